"""Laws of the metric files: a resumed run leaves each step once, whatever was written after the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.observe.jsonl import read_lines
from nemo_rl_like.observe.metrics import JsonlSink, TensorBoardSink, read_series
from nemo_rl_like.observe.timing import Timings


@settings(deadline=None)
@given(saved=st.integers(0, 6), extra=st.integers(0, 4), torn=st.booleans())
def test_resume_leaves_every_step_once(
    tmp_path_factory: pytest.TempPathFactory, saved: int, extra: int, torn: bool
) -> None:
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(saved):
        sink.write(step, {"reward": step / 3})
    lines = sink.position()
    for step in range(saved, saved + extra):
        sink.write(step, {"reward": -1.0})
    sink.close()
    if torn:
        path.write_bytes(path.read_bytes() + b'{"step": 99, "rew')
    resumed = JsonlSink(path)
    resumed.truncate(lines)
    for step in range(saved, 8):
        resumed.write(step, {"reward": step / 3})
    resumed.close()
    assert read_series(path, "reward") == [(step, step / 3) for step in range(8)]


def test_a_new_sink_appends_and_position_is_the_number_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    for step in range(2):
        sink = JsonlSink(path)
        sink.write(step, {"reward": 1.0})
        assert sink.position() == step + 1
        sink.close()
    assert [row["step"] for row in read_lines(path)] == [0, 1]


def test_a_file_shorter_than_the_checkpoint_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(OutputFolderError, match=r"1 lines.*had 2:"):
        sink = JsonlSink(path)
        sink.write(1, {"reward": 0.5})
        sink.truncate(2)


def test_the_position_does_not_depend_on_how_long_numbers_are(tmp_path: Path) -> None:
    positions = set()
    for i, seconds in enumerate((0.1, 0.123456789)):
        sink = JsonlSink(tmp_path / f"{i}.jsonl")
        sink.write(1, {"timing/step": seconds})
        positions.add(sink.position())
    assert positions == {1}


def test_every_line_is_strict_json_and_not_finite_is_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"kl": float("nan"), "loss": float("inf"), "reward": 0.1})
    sink.close()
    line = (tmp_path / "m.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "kl": None, "loss": None, "reward": 0.1}
    assert read_series(tmp_path / "m.jsonl", "kl") == []


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"reward": 0.5})
    assert read_series(tmp_path / "m.jsonl", "reward") == [(1, 0.5)]


def test_a_metric_named_step_is_refused(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="`step`"):
        sink.write(4, {"step": 1.0})
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_tensorboard_of_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    for step in range(5):
        first.write(step, {"reward": -1.0})
    first.close()
    resumed = TensorBoardSink(tmp_path, resume_step=2)
    for step in range(2, 6):
        resumed.write(step, {"reward": 1.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=True)
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward")]
    assert found == [(0, -1.0), (1, -1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0)]


def test_timings_add_up_by_part_and_start_again() -> None:
    timings = Timings()
    timings.add("decode", 1.5)
    with pytest.raises(KeyError), timings.part("decode"):
        raise KeyError
    with timings.part("sync"):
        pass
    taken = timings.collect()
    assert list(taken) == ["timing/decode", "timing/sync"]
    assert 1.5 < taken["timing/decode"] < 2.5
    assert timings.collect() == {}
