"""Laws of a stage's metric files: a resumed run leaves each step once, in the lines and in TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_like.observe.metrics import read_series
from nemo_rl_like.training.screen import METRICS, MetricFiles


def write(files: MetricFiles, first: int, last: int, value: float) -> None:
    for step in range(first, last + 1):
        files.write(step, {"reward": value})


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_resumed_run_leaves_each_step_once(tmp_path: Path, tensorboard: bool) -> None:
    files = MetricFiles(tmp_path, tensorboard=tensorboard)
    files.truncate(0, -1)
    write(files, 0, 2, 1.0)
    kept = files.position()
    write(files, 3, 4, -1.0)
    files.close()
    resumed = MetricFiles(tmp_path, tensorboard=tensorboard)
    resumed.truncate(kept, 2)
    write(resumed, 3, 5, 1.0)
    resumed.close()
    want = [(step, 1.0) for step in range(6)]
    assert read_series(tmp_path / METRICS, "reward") == want
    assert (tmp_path / "tensorboard").exists() == tensorboard
    if tensorboard:
        assert events(tmp_path / "tensorboard") == want


def events(folder: Path) -> list[tuple[int, float]]:
    """What TensorBoard shows of `reward`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), purge_orphaned_data=True)
    shown.Reload()
    return [(event.step, event.value) for event in shown.Scalars("reward")]
