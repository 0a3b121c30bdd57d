"""Laws of a job's stops: so many in a row that saved nothing new end it, and anything new starts the count again."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_like.launch.node.stops import NAME, NoProgress, count_stop, saved
from nemo_rl_like.spec.launch import LaunchSpec

LAUNCH = LaunchSpec(stops_without_progress=3, time_limit_min=10, save_before_end_s=120)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "run.jobs").mkdir()
    return tmp_path / "run"


def checkpoint(output: Path, step: int) -> None:
    folder = output / "rl" / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def stop(output: Path, job: str = "slurm-7", *, new: int | None = None) -> None:
    """One start that is told to stop, after it saved step `new`."""
    before = saved(output)
    if new is not None:
        checkpoint(output, new)
    count_stop(output, job, LAUNCH, before)


def test_the_third_stop_in_a_row_without_anything_new_ends_the_job(output: Path) -> None:
    stop(output)
    stop(output)
    words = r"3 times in a row \(`launch\.stops_without_progress`\).*`launch\.time_limit_min`: 10 min.*\(120 s\)"
    with pytest.raises(NoProgress, match=words) as caught:
        stop(output)
    assert caught.value.exit_code == 2, "the job script starts nothing again after it"
    stop(output)


def test_a_checkpoint_between_two_stops_starts_the_count_again(output: Path) -> None:
    for step in (1, 2, 3, 4):
        stop(output)
        stop(output)
        stop(output, new=step)
    stop(output)
    stop(output)
    checkpoint(output, 5)  # by a start that was killed
    stop(output)
    stop(output)


def test_another_job_of_the_same_run_counts_anew(output: Path) -> None:
    for job in ("slurm-7", "slurm-8", "slurm-9"):
        stop(output, job)
        stop(output, job)


def test_a_checkpoint_that_was_not_finished_is_nothing_new(output: Path) -> None:
    (output / "rl" / "checkpoints" / ".tmp-step_1").mkdir(parents=True)
    (output / "rl" / "checkpoints" / "step_1").mkdir()
    assert saved(output) == ()
    (output / "sample" / "parts").mkdir(parents=True)
    (output / "sample" / "parts" / "00000000.json").touch()
    assert saved(output) == ("sample/parts/00000000.json",)
    stop(output)
    assert (output.with_name("run.jobs") / NAME).is_file()
