"""Supervised fine-tuning as a recipe: a batch of examples, one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.order import DataPosition
from nemo_rl_like.observe.timing import Timings
from nemo_rl_like.policy.client import POLICY, Policy
from nemo_rl_like.spec.experiment import SftStageSpec
from nemo_rl_like.training.recipe import StepReport
from nemo_rl_like.training.sft_service import SftBatch

DATA = "data"


@dataclass(slots=True)
class SftRecipe:
    """Cross-entropy on assistant tokens."""

    spec: SftStageSpec
    policy: Policy
    workers: WorkerGroup
    """Hosts the service `data`."""
    _position: DataPosition = field(init=False)
    _validation: ray.ObjectRef | None = None
    _updates: int = 0
    _timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        self._position = cast(DataPosition, self.workers.call(DATA, "start", what="start of the data"))

    @property
    def total_steps(self) -> int:
        """Optimizer steps."""
        return self.spec.steps

    @property
    def updates(self) -> Mapping[str, int]:
        """Optimizer steps made."""
        return {POLICY: self._updates}

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        return ("loss", "validation/loss", "lr", "grad_norm", "timing/step")

    def start(self) -> None:
        """Make the validation batch."""
        if self.spec.validate_every_steps:
            got = self.workers.call(DATA, "validation", self.spec.validation_examples, what="validation batch")
            self._validation = cast(ray.ObjectRef | None, got)

    def before_first_step(self) -> StepReport:
        """The validation loss before training."""
        return StepReport(self._validate())

    def step(self, step: int) -> StepReport:
        """One optimizer step."""
        with self._timings.part("data"):
            examples = self.spec.examples_per_step
            got = cast(
                SftBatch, self.workers.call(DATA, "batch", self._position, examples, what=f"batch of step {step}")
            )
        with self._timings.part("update"):
            metrics = self.policy.train_step(
                got.batch, None, CrossEntropy(self.spec.loss == "dft"), what=f"step {step}"
            )
        self._position = got.position
        self._updates += 1
        metrics |= {"tokens": float(got.tokens), "dropped_examples": float(got.dropped)}
        if self.spec.validate_every_steps and step % self.spec.validate_every_steps == 0:
            metrics |= self._validate()
        return StepReport({**metrics, **self._timings.collect()})

    def state(self) -> dict[str, JSON]:
        """Position in the data and the optimizer steps made."""
        return {"position": asdict(self._position), "updates": self._updates}

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave."""
        self._updates = cast(int, state.get("updates", 0))
        position = cast(Mapping[str, str | int] | None, state.get("position"))
        if position is not None:
            self._position = DataPosition(str(position["dataset_sha256"]), int(position["consumed"]))

    def _validate(self) -> dict[str, float]:
        if self._validation is None:
            return {}
        with self._timings.part("validation"):
            metrics = self.policy.loss(self._validation, CrossEntropy(), "validation")
        return {f"validation/{name}": value for name, value in metrics.items()}
