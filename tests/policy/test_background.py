"""A save in the background writes what the tensors were when it began."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl_like.checkpoint.layout import SECTIONS, ModelIdentity
from nemo_rl_like.checkpoint.reader import CheckpointReader
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.policy.background import BackgroundSave, Copies
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tensors.packed import Packed
from nemo_rl_like.tensors.shards import ShardFile
from tests.policy.ranks import run_ranks
from tests.policy.step_laws import DECAYED, member, train_two
from tests.policy.test_laws import make_folder


@pytest.fixture
def save() -> Iterator[BackgroundSave]:
    made = BackgroundSave()
    yield made
    made.close()


def test_copies_are_of_the_time_when_it_began_and_their_memory_is_used_again(save: BackgroundSave) -> None:
    weight, seen, go = torch.arange(4.0), [], threading.Event()

    def write(copies: Copies) -> tuple[ShardFile, ...]:
        assert go.wait(60)
        (copied,) = dict(copies)["weights"]
        seen.append((copied.tensor.data_ptr(), dict(copied.tensors())["w"].tolist()))
        return ()

    def sections() -> Iterator[tuple[str, Iterator[Packed]]]:
        yield "weights", iter([Packed(("w",), weight, lambda packed: [packed])])

    for start in (0.0, 10.0):
        go.clear()
        save.begin(sections(), write)
        weight += 10
        assert not save.written().done()
        with pytest.raises(RuntimeError, match="still being written"):
            save.begin(sections(), write)
        go.set()
        save.written().result(60)
        assert seen[-1][1] == [start + i for i in range(4)]
    assert seen[0][0] == seen[1][0]


def test_what_the_writer_raises_is_what_waiting_for_it_raises(save: BackgroundSave) -> None:
    with pytest.raises(RuntimeError, match="no save has begun"):
        save.written()

    def write(copies: Copies) -> tuple[ShardFile, ...]:
        raise OSError("gone")

    save.begin((), write)
    with pytest.raises(OSError, match="gone"):
        save.written().result(60)


def trained_on(rank: int, world: int, port: int, folder: Path, root: Path) -> dict[str, list[float]]:
    """Losses of two steps made while a save is written, and of two steps after loading it."""
    first = member(rank, world, port, folder, PolicySpec(), DECAYED)
    train_two(first)
    with CheckpointWriter(root, 2, ModelIdentity("tiny", "tiny"), SECTIONS) as writer:
        first.begin_save(str(writer.begin()))
        after = train_two(first)
        writer.commit({}, first._background.written().result(60))
    again = member(rank, world, port, folder, PolicySpec(), DECAYED)
    again.load(str(root / "step_2"), 2)
    return {"after": after, "again": train_two(again)}


def test_a_rank_that_trains_on_while_it_is_saved_saves_what_it_was(tmp_path: Path) -> None:
    found = run_ranks(trained_on, 1, tmp_path, make_folder(tmp_path / "model"), tmp_path / "saved")
    assert found["after"] == pytest.approx(found["again"], abs=1e-6)
    reader = CheckpointReader.latest(tmp_path / "saved")
    assert reader is not None and reader.step == 2
