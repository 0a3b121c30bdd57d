"""A submission: a folder beside the run's output that holds the resolved spec, the rendered files, the logs and what was asked of whom.

`<output>.jobs/0001/`, `0002/`, ... No state of a job stands anywhere else.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.artifacts.files import atomic_write
from nemo_rl_like.pipeline.records import RUN

RECORD = "record.json"
SPEC = "spec.yaml"
_LOCK = ".lock"


class Record(BaseModel):
    """What was submitted, to whom, and as what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    target: str
    """Name of the target."""
    job_id: str
    """The target's id of the job."""
    command: tuple[str, ...]
    """What started it."""
    submitted: str
    """Time, ISO 8601."""
    working_folder: str
    """Folder that relative paths in the spec start from."""
    until: str | None = None
    """Last stage to run."""
    after: str | None = None
    """Id of the job that it waited for."""
    seeds: tuple[int, ...] = ()
    """Seeds of an array."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission that was made."""

    folder: Path
    record: Record


def jobs_folder(output: Path) -> Path:
    """Where the submissions of an output folder lie: beside it, since a run's folder holds nothing else."""
    return output.with_name(f"{output.name}.jobs")


def output_of(folder: Path) -> Path:
    """The output folder that a submission's folder belongs to."""
    return folder.parent.with_name(folder.parent.name.removesuffix(".jobs"))


def submissions(output: Path) -> list[Submission]:
    """The submissions of an output folder, the oldest first. Raises OutputFolderError for a damaged record."""
    folders = sorted(path.parent for path in jobs_folder(output).glob(f"[0-9]*/{RECORD}"))
    return [Submission(folder, _read(folder / RECORD)) for folder in folders]


def find(run: Path) -> Submission:
    """The submission that a person means: a submission's folder, or the newest of an output folder; of one seed's, that task of its array.

    Raises OutputFolderError.
    """
    run = run.absolute()
    if (run / RECORD).is_file():
        return Submission(run, _read(run / RECORD))
    found = submissions(run) or _of_seed(run)
    if not found and (run / RUN).is_file():
        raise OutputFolderError(
            f"{run} was started by `nrl run` and never submitted: `nrl pipeline status {quote(str(run))}` tells how far it is, Ctrl-C where "
            f"it runs makes it save, and `nrl resume {quote(str(run))}` goes on"
        )
    if not found:
        raise OutputFolderError(
            f"{run} has no submission (no {jobs_folder(run)}/*/{RECORD}); give the output folder of a run that was submitted, or a "
            "submission's own folder"
        )
    return found[-1]


def outputs(one: Submission) -> list[Path]:
    """The output folders of a submission: one a seed of an array."""
    output = output_of(one.folder)
    return [seed_output(output, seed) for seed in one.record.seeds] or [output]


def _of_seed(run: Path) -> list[Submission]:
    """Arrays that have a task for this output, as if they had no other: their id is `JOB_SEED`."""
    name, _, seed = run.name.rpartition("-seed")
    if not name or not seed.isdecimal():
        return []
    arrays = [one for one in submissions(run.with_name(name)) if int(seed) in one.record.seeds]
    return [
        replace(
            one, record=one.record.model_copy(update={"job_id": f"{one.record.job_id}_{seed}", "seeds": (int(seed),)})
        )
        for one in arrays
    ]


@contextmanager
def numbered(output: Path) -> Iterator[Path]:
    """A new folder for a submission, while no other submission of this output is made; removed again when the block fails."""
    parent = jobs_folder(output)
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
        folder = parent / f"{max(taken, default=0) + 1:04d}"
        folder.mkdir(mode=0o750)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder)
            raise


def write_record(folder: Path, record: Record) -> None:
    """Write what was submitted, in one move."""
    atomic_write(folder / RECORD, (record.model_dump_json(indent=1) + "\n").encode())


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write texts by name below the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _read(path: Path) -> Record:
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise OutputFolderError(f"{path} cannot be read as a submission's record: {error}") from error


def seed_output(output: Path, seed: int) -> Path:
    """Output folder of one seed of an array."""
    return output.with_name(f"{output.name}-seed{seed}")
