"""The targets by name; each is imported when it is asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

from nemo_rl_like.artifacts.errors import SpecError, SubmitError
from nemo_rl_like.launch.target import Target
from nemo_rl_like.spec.nearest import nearest


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a target is, and what only some of them can."""

    path: str
    """`pkg.mod:Class`, made without arguments."""
    arrays: bool = False
    """One submission may hold several seeds (`Job.seeds`)."""
    chains: bool = False
    """A job may wait for another's success (`Job.after`)."""
    groups: bool = False
    """A job may have hosts of two kinds (`launch.generation`)."""
    token_file: bool = False
    """Hosts of a job read its token beside the spec."""


TARGETS = {
    "local": Entry("nemo_rl_like.launch.local:LocalTarget"),
    "slurm": Entry(
        "nemo_rl_like.launch.slurm.target:SlurmTarget", arrays=True, chains=True, groups=True, token_file=True
    ),
    "kubernetes": Entry("nemo_rl_like.launch.kubernetes.target:KubernetesTarget"),
    "container": Entry("nemo_rl_like.launch.container:ContainerTarget"),
    "nemo-run-local": Entry("nemo_rl_like.launch.nemo_run:NemoRunLocal"),
    "nemo-run-slurm": Entry("nemo_rl_like.launch.nemo_run:NemoRunSlurm", token_file=True),
}


def entry(name: str) -> Entry:
    """The registered target. Raises SpecError for a name that is none."""
    if name not in TARGETS:
        near = nearest(name, TARGETS)
        meant = f"; did you mean `{near}`?" if near else ""
        raise SpecError(f"there is no target {name!r}{meant}; the targets are {', '.join(TARGETS)}")
    return TARGETS[name]


def target(name: str) -> Target:
    """A target. Raises SpecError for a name that is none, SubmitError for one whose code or packages are not installed."""
    module, _, attribute = entry(name).path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise SubmitError(f"target {name} needs the module {error.name}, which is not installed here") from error
    return cast(Target, found())
