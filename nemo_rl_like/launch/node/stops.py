"""Counts the stops of a job that saved nothing new: one whose wall time is too short to get anywhere must not be started again for ever."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.artifacts.files import atomic_write
from nemo_rl_like.pipeline.records import read_status
from nemo_rl_like.spec.launch import LaunchSpec

NAME = "stops.json"
"""Name of the file beside the job's logs."""
_KEPT = ("*/checkpoints/step_*/manifest.json", "*/parts/*.json")
"""Files that a stage writes when it has got further: a checkpoint, a part of its samples."""


class NoProgress(NrlError):
    """The job was told to stop several times in a row before it had saved anything new; a further start would end the same way."""

    exit_code = 2


class _Stops(BaseModel):
    model_config = ConfigDict(frozen=True)

    job: str
    """Which job stopped."""
    saved: tuple[str, ...]
    """What there was to go on from."""
    count: int
    """Stops in a row that added nothing to it."""


def saved(output: Path) -> tuple[str, ...]:
    """What a start of the run has to go on from: stages that are done, checkpoints, parts of samples."""
    done = [name for name, record in read_status(output).stages.items() if record.state == "done"]
    kept = [path.relative_to(output).as_posix() for pattern in _KEPT for path in output.glob(pattern)]
    return tuple(sorted([*done, *kept]))


def count_stop(output: Path, job: str, launch: LaunchSpec, before: tuple[str, ...]) -> None:
    """Note that a job stopped, which its scheduler starts again.

    Args:
        output: the run's folder; the count lies beside it, in `<output>.jobs`.
        job: what names the job in all its starts.
        before: what was `saved` when this start began.

    Raises:
        NoProgress: it was the `launch.stops_without_progress`-th in a row that saved nothing new.
    """
    path = Path(f"{output}.jobs") / NAME
    if saved(output) != before:
        return path.unlink(missing_ok=True)
    last = _Stops.model_validate_json(path.read_bytes()) if path.exists() else None
    count = 1 if last is None or (last.job, last.saved) != (job, before) else last.count + 1
    if count < launch.stops_without_progress:
        atomic_write(path, (_Stops(job=job, saved=before, count=count).model_dump_json() + "\n").encode())
        return
    path.unlink(missing_ok=True)
    limit = "the scheduler's" if launch.time_limit_min is None else f"{launch.time_limit_min} min"
    raise NoProgress(
        f"told to stop {count} times in a row (`launch.stops_without_progress`) before anything new was saved. A start has its wall time "
        f"(`launch.time_limit_min`: {limit}) less `launch.save_before_end_s` ({launch.save_before_end_s:g} s) to start up and do a step: raise the one, "
        "lower the other, or make a step smaller; `nrl resubmit` goes on"
    )
