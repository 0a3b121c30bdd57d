"""A run that is told to stop saves, stops, and goes on where it was, in whichever moment it is told; equal runs leave equal checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import StoppedBySignal
from nemo_rl_like.artifacts.types import Checkpoint
from nemo_rl_like.checkpoint.layout import ModelIdentity
from nemo_rl_like.checkpoint.reader import CheckpointReader
from nemo_rl_like.spec.stage import CheckpointSpec
from nemo_rl_like.tensors.shards import ShardFile
from nemo_rl_like.training.recipe import StepReport
from nemo_rl_like.training.screen import MetricFiles
from nemo_rl_like.training.trainer import Trainer
from tests.training.test_saver import Models, Writing

STEPS = 3
Told = Callable[[str], None]


@dataclass
class Counting:
    """Stands in for a recipe: counts its steps."""

    told: Told
    total_steps: int = STEPS
    headline: tuple[str, ...] = ()
    updates: Mapping[str, int] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.told("start")

    def before_first_step(self) -> StepReport:
        return StepReport({})

    def step(self, step: int) -> StepReport:
        self.told(f"step {step}")
        self.made.append(step)
        return StepReport({"timing/data": 0.1 ** len(self.made)})

    def state(self) -> dict[str, object]:
        return {}

    def load_state(self, state: Mapping[str, object]) -> None:
        assert state == {}


@dataclass
class Saving(Models):
    """Stands in for `TrainedModels`, which may be told while it saves."""

    told: Told = print

    def save(self, folder: Path) -> tuple[ShardFile, ...]:
        self.told("save")
        return super().save(folder)

    def begin_save(self, folder: Path) -> tuple[Writing, ...]:
        self.told("save")
        return super().begin_save(folder)

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        assert updates == {}


class Quiet:
    """Stands in for recorder and screen."""

    def position(self) -> int:
        return 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert set(metrics) == {"timing/data", "timing/step"}

    def truncate(self, position: int, step: int) -> None:
        self.taken_back_to = position

    def begin(self, done: int, total: int) -> None:
        self.total = total

    def step(self, step: int, report: StepReport) -> None:
        self.shown = step

    def end(self) -> None:
        self.ended = True


def trainer(folder: Path, told: Told, *, asynchronous: bool) -> tuple[Trainer, Counting]:
    recipe, quiet = Counting(told), Quiet()
    spec = CheckpointSpec(asynchronous=asynchronous, every_steps=2)
    parts = (recipe, Saving(told=told), ModelIdentity("x", "a model"), spec, quiet, quiet)
    return Trainer(folder, *parts), recipe  # type: ignore[arg-type]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("moment", ["start", "step 1", "step 2", "step 3", "save", "last save"])
def test_it_stops_after_the_step_and_saves_it(
    tmp_path: Path, moment: str, number: signal.Signals, asynchronous: bool
) -> None:
    sent: list[str] = []

    def told(now: str) -> None:
        sent.append(now)
        if moment in (now, f"last {now}" if "step 3" in sent else ""):
            signal.raise_signal(number)

    first, recipe = trainer(tmp_path, told, asynchronous=asynchronous)
    with pytest.raises(StoppedBySignal, match=rf"{number.name}: saved .*step_\d and stopped after step \d of 3"):
        first.fit()
    reader = CheckpointReader.latest(tmp_path / "checkpoints")
    assert reader is not None and recipe.made == list(range(1, reader.step + 1))
    second, rest = trainer(tmp_path, lambda now: None, asynchronous=asynchronous)
    assert second.fit() == tmp_path / "checkpoints" / f"step_{STEPS}"
    assert recipe.made + rest.made == [1, 2, 3]


def test_a_checkpoint_is_the_same_whatever_the_times_and_stops_before_it(tmp_path: Path) -> None:
    """What builds on it is not run again for them: a stage's key has the hash of this folder in it."""
    hashes = set()
    for stops in (0, 1):
        folder = tmp_path / str(stops)
        for _ in range(stops):
            first, _ = trainer(folder, lambda now: signal.raise_signal(signal.SIGTERM), asynchronous=False)
            first.recorder = MetricFiles(folder, tensorboard=False)
            with pytest.raises(StoppedBySignal):
                first.fit()
        last, _ = trainer(folder, lambda now: None, asynchronous=False)
        last.recorder = MetricFiles(folder, tensorboard=False)
        hashes.add(Checkpoint.of(last.fit()).content_hash)
    assert len(hashes) == 1
