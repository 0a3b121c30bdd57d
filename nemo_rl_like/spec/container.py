"""What a container runtime of this machine must know of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveFloat

from nemo_rl_like.spec.base import Spec, form


class ContainerSpec(Spec):
    """How `nrl submit --to container` runs a job on this machine."""

    runtime: Literal["docker", "podman"] = "docker"
    """Program that runs it."""
    user: Annotated[str, form(r"^[1-9][0-9]{0,9}:[0-9]{1,10}$", "`uid:gid`, two numbers, the first not 0")] | None = (
        None
    )
    """User and group id of every process, `1000:1000`; never root. Default: whoever submits."""
    shm_gib: PositiveFloat = 8.0
    """Size of /dev/shm, in GiB: Ray's object store, NCCL and weights on their way to vLLM. Counted in `memory_gib_per_node`."""
    scratch_gib: PositiveFloat = 4.0
    """Size of /tmp and of the home folder each, in GiB; both lie in memory and end with the container."""
    read_only_root: bool = True
    """Only mounts, /tmp, /dev/shm and the home folder can be written."""
