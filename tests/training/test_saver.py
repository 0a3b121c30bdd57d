"""The saver: one save at a time, committed when its ranks have written, the one before untouched until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.checkpoint.layout import CheckpointError, ModelIdentity
from nemo_rl_like.checkpoint.reader import CheckpointReader
from nemo_rl_like.checkpoint.shards import section_writer
from nemo_rl_like.spec.stage import CheckpointSpec
from nemo_rl_like.tensors.shards import ShardFile
from nemo_rl_like.training.saver import Saver


@dataclass
class Writing:
    """Stands in for the ranks that write copies of a model."""

    folder: Path
    value: float
    ended: bool = False
    error: NrlError | None = None

    def shards(self) -> tuple[ShardFile, ...]:
        if self.error is not None:
            raise self.error
        with section_writer(self.folder, "weights") as shards:
            shards.add("w", torch.full((3,), self.value))
        return tuple(shards.files)


@dataclass
class Models:
    """Stands in for `TrainedModels`."""

    value: float = 1.0
    sections: Sequence[str] = ("weights",)
    begun: list[Writing] = field(default_factory=list)

    def save(self, folder: Path) -> tuple[ShardFile, ...]:
        return Writing(folder, self.value).shards()

    def begin_save(self, folder: Path) -> tuple[Writing, ...]:
        self.begun.append(Writing(folder, self.value))
        return (self.begun[-1],)


def saver(root: Path, models: Models, *, asynchronous: bool = True) -> Saver:
    spec = CheckpointSpec(asynchronous=asynchronous, keep_last=2)
    return Saver(root, ModelIdentity("x", "a model"), models, spec)  # type: ignore[arg-type]


def latest(root: Path) -> tuple[int, float] | None:
    reader = CheckpointReader.latest(root)
    return None if reader is None else (reader.step, float(reader.tensors("weights")["w"][0]))


def test_a_synchronous_save_is_there_when_it_returns(tmp_path: Path) -> None:
    assert saver(tmp_path, Models(), asynchronous=False).save(1, {}, None) == tmp_path / "step_1"
    assert latest(tmp_path) == (1, 1.0)


def test_a_save_is_committed_by_the_first_poll_after_its_ranks_ended(tmp_path: Path) -> None:
    models = Models()
    this = saver(tmp_path, models)
    assert this.save(1, {}, None) == tmp_path / "step_1"
    models.value = 2.0
    this.poll()
    assert latest(tmp_path) is None
    models.begun[0].ended = True
    this.poll()
    assert latest(tmp_path) == (1, 1.0)


def test_the_next_save_waits_for_the_one_before_and_old_ones_go(tmp_path: Path) -> None:
    this = saver(tmp_path, Models())
    for step in (1, 2, 3, 4):
        this.save(step, {}, None)
    assert latest(tmp_path) == (3, 1.0)
    this.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_3", "step_4"]


def test_a_save_that_cannot_be_written_leaves_the_one_before_and_no_half_one(tmp_path: Path) -> None:
    models = Models()
    this = saver(tmp_path, models)
    this.save(1, {}, None)
    this.finish()
    this.save(2, {}, None)
    models.begun[-1].error = CheckpointError("no space")
    with pytest.raises(CheckpointError, match="no space"):
        this.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    this.finish()
    this.save(3, {}, None)
    models.begun[-1].error = CheckpointError("no space")
    this.salvage()
    assert latest(tmp_path) == (1, 1.0)


def test_after_another_error_a_begun_save_is_still_committed(tmp_path: Path) -> None:
    this = saver(tmp_path, Models())
    this.save(1, {}, None)
    this.salvage()
    assert latest(tmp_path) == (1, 1.0)
