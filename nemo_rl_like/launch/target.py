"""What a scheduler is to the rest: it renders a job without side effects, checks it, starts it, and tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from nemo_rl_like.spec.experiment import ExperimentSpec

State = Literal["queued", "running", "done", "failed", "cancelled", "unknown"]


@dataclass(frozen=True, slots=True)
class Job:
    """One experiment to start, as every target sees it."""

    name: str
    """Name of the job: letters, digits and `-`."""
    spec: ExperimentSpec
    """What runs, and on which hosts (`launch`)."""
    folder: Path
    """The submission's own folder, absolute, seen by every host: `spec.yaml`, rendered files, logs, record."""
    working_folder: Path = Path("/")
    """Folder that relative paths in the spec start from, absolute, seen by every host."""
    until: str | None = None
    """Last stage to run; None: all."""
    after: str | None = None
    """The target's id of a job that must have ended well before; only of a target that chains jobs (`registry`)."""
    seeds: tuple[int, ...] = ()
    """One task a seed, each with `seed-N.yaml` in place of `spec.yaml`; only of a target that has arrays (`registry`)."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Files of a job, and the command that would start them."""

    files: Mapping[str, str]
    """Text by file name, below the submission's folder."""
    command: tuple[str, ...]
    """What starts the job: the words of a command, no shell."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How far a job is."""

    state: State
    """In the words of every target."""
    detail: str
    """In the target's own words: its state, reason, exit code."""
    exit_code: int | None = None
    """Exit code of the driver, once it ended."""


class Target(Protocol):
    """A scheduler. Every command that it runs has a deadline and no shell."""

    name: str
    """`local`, `slurm`, `kubernetes` or `container`."""

    def problems(self, job: Job) -> list[str]:
        """Fields that this target cannot honour, each with value, limit and fix; needs no cluster."""
        ...

    def render(self, job: Job) -> Rendered:
        """The job's files: a pure function of the job."""
        ...

    def dry_run(self, job: Job, rendered: Rendered) -> None:
        """Let the target itself check the rendered files. Raises SubmitError with its words."""
        ...

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Start it; returns the target's id of the job. Raises SubmitError with the target's words."""
        ...

    def status(self, job_id: str, folder: Path) -> JobStatus:
        """How far the job is."""
        ...

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Lines of the driver's log; with `follow` until the job ends."""
        ...

    def cancel(self, job_id: str, folder: Path) -> None:
        """End the job; no error where it has ended."""
        ...
