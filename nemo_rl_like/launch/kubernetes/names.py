"""Names and quantities as Kubernetes writes them."""

from __future__ import annotations

import hashlib
import math
import re

from nemo_rl_like.launch.target import Job

LONGEST_NAME = 40
"""Characters of a job's name: KubeRay takes 47, and a pod's name adds its role, index and five random letters to make at most 63."""

SPEC_FOLDER = "/etc/nrl/spec"
SPEC_FILE = f"{SPEC_FOLDER}/spec.yaml"
TOKEN_FOLDER = "/etc/nrl/ray"
TOKEN_KEY = "auth_token"
"""Key that KubeRay reads in the Secret of `authOptions.secretName` (KubeRay 1.6, docs.ray.io, token authentication)."""
HOME = "/home/nrl"
SHM = "/dev/shm"
SCRATCH = {"tmp": "/tmp", "home": HOME}
"""Folders that can be written beside the volumes, by the name of their volume."""

MIB_PER_GIB = 1024


def object_name(job: Job) -> str:
    """Name of the job's objects: a label of a DNS name (RFC 1035), at most LONGEST_NAME characters.

    What of the job's name can stay does; a hash of it and of the submission's folder keeps jobs apart, for one may be submitted again while the
    last is kept.
    """
    mark = hashlib.sha256(f"{job.name}\n{job.folder}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
    kept = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    if not kept[:1].isalpha():
        kept = f"job-{kept}"
    return f"{kept[: LONGEST_NAME - len(mark) - 1].rstrip('-')}-{mark}"


def mebibytes(gib: float) -> int:
    """GiB in whole MiB, rounded up."""
    return math.ceil(gib * MIB_PER_GIB)


def quantity(gib: float) -> str:
    """GiB as a quantity of Kubernetes."""
    return f"{mebibytes(gib)}Mi"


def literal(value: str) -> str:
    """A value of an environment variable that Kubernetes takes as it is: without this it replaces `$(NAME)` in one."""
    return value.replace("$", "$$")


def token_secret(name: str) -> str:
    """Name of the Secret that holds the token of a job's Ray ports."""
    return f"{name}-ray"
