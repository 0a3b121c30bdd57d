"""The one Trainer shell: steps, records, checkpoints, resume and signals around any recipe."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from nemo_rl_like.artifacts.errors import StoppedBySignal
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.checkpoint.layout import ModelIdentity
from nemo_rl_like.checkpoint.reader import CheckpointReader
from nemo_rl_like.policy.client import TrainedModels
from nemo_rl_like.spec.stage import CheckpointSpec
from nemo_rl_like.training.recipe import Recipe, StepReport
from nemo_rl_like.training.saver import Saver
from nemo_rl_like.training.signals import StopRequest

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"


class Recorder(Protocol):
    """Where metric lines go; lines behind a position can be taken back."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one line."""
        ...

    def position(self) -> int:
        """Where the next line will stand."""
        ...

    def truncate(self, position: int, step: int) -> None:
        """Take back every line from `position` on, and what was recorded after `step`."""
        ...


class Screen(Protocol):
    """What a person sees of the run."""

    def begin(self, done: int, total: int) -> None:
        """The loop starts after step `done`."""
        ...

    def step(self, step: int, report: StepReport) -> None:
        """One step ended."""
        ...

    def end(self) -> None:
        """The loop ended, however."""
        ...


@dataclass(slots=True)
class Trainer:
    """Runs a recipe to its end, killed and resumed any number of times.

    A checkpoint holds weights, optimizer, and `state.json` with the step, the recipe's state and the recorder's position;
    what was recorded behind it is taken back on resume, so that no line is there twice and none is missing.
    """

    folder: Path
    """The stage's output folder."""
    recipe: Recipe
    models: TrainedModels
    identity: ModelIdentity
    """Model that the checkpoints belong to."""
    spec: CheckpointSpec
    recorder: Recorder
    screen: Screen
    _latest: Mapping[str, float] = field(default_factory=dict)
    _saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        self._saver = Saver(self._root, self.identity, self.models, self.spec)

    def fit(self) -> Path:
        """Train from the newest valid checkpoint, or from the start; returns the final checkpoint's folder.

        Raises StoppedBySignal after saving, when SIGTERM, SIGUSR1 or Ctrl-C asked to stop.
        """
        done = self._resume()
        total = self.recipe.total_steps
        last = self._root / f"step_{done}"
        with StopRequest() as stop:
            try:
                self.recipe.start()
                if done == 0:
                    self._record(0, self.recipe.before_first_step())
                self.screen.begin(done, total)
                for step in range(done + 1, total + 1):
                    last = self._step(step, stop) or last
                self._saver.finish()
                self._stop_if_told(stop, total, last)
            except Exception:
                self._saver.salvage()
                raise
            finally:
                self.screen.end()
        return last

    @property
    def _root(self) -> Path:
        return self.folder / CHECKPOINTS

    def _step(self, step: int, stop: StopRequest) -> Path | None:
        began = time.perf_counter()
        report = self.recipe.step(step)
        timed = {**report.metrics, "timing/step": time.perf_counter() - began}
        self._record(step, StepReport(timed, report.samples))
        self._saver.poll()
        due = self.spec.every_steps and step % self.spec.every_steps == 0
        saved = self._save(step) if due or step == self.recipe.total_steps or stop.received else None
        if saved is not None:
            self._stop_if_told(stop, step, saved)
        return saved

    def _stop_if_told(self, stop: StopRequest, step: int, saved: Path) -> None:
        """Also after the last step: whoever asked the run to stop wants no next stage either."""
        if stop.received:
            self._saver.finish()
            raise StoppedBySignal(
                f"{stop.received}: saved {saved} and stopped after step {step} of {self.recipe.total_steps}; a resumed run goes on there"
            )

    def _record(self, step: int, report: StepReport) -> None:
        self._latest = {**self._latest, **report.metrics}
        if report.metrics:
            self.recorder.write(step, report.metrics)
            self.screen.step(step, report)

    def _save(self, step: int) -> Path:
        state: dict[str, JSON] = {
            "step": step,
            "updates": dict(self.recipe.updates),
            "recipe": self.recipe.state(),
            "recorder": self.recorder.position(),
        }
        return self._saver.save(step, state, self._latest.get(self.spec.best_metric))

    def _resume(self) -> int:
        """Take up the newest valid checkpoint; returns its step, 0 when there is none."""
        found = CheckpointReader.latest(self._root)
        if found is None:
            self.recorder.truncate(0, -1)
            self.recipe.load_state({})
            return 0
        found.require_model(self.identity)
        self.models.load(found.folder, cast(Mapping[str, int], found.state["updates"]))
        self.recipe.load_state(cast(Mapping[str, JSON], found.state["recipe"]))
        self.recorder.truncate(cast(int, found.state["recorder"]), found.step)
        logger.info("resumed from %s", found.folder)
        return found.step
