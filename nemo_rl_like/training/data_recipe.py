"""What recipes on a dataset have in common: a batch of examples, one optimizer step, a validation now and then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import Objective
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.order import DataPosition
from nemo_rl_like.observe.timing import Timings
from nemo_rl_like.policy.client import POLICY, Policy
from nemo_rl_like.training.data_service import DataBatch
from nemo_rl_like.training.recipe import StepReport

DATA = "data"


@dataclass(frozen=True, slots=True)
class DataPlan:
    """How much of the data is used when."""

    steps: int
    """Optimizer steps."""
    examples_per_step: int
    """Examples in one optimizer step."""
    validate_every_steps: int
    """Steps between two validations; 0 = never."""
    validation_examples: int
    """Examples of one validation."""


@dataclass
class DataRecipe(ABC):
    """One optimizer step a batch; a subclass says what is minimised."""

    plan: DataPlan
    policy: Policy
    workers: WorkerGroup
    """Hosts the service `data`."""
    _position: DataPosition = field(init=False)
    _validation: ray.ObjectRef | None = field(init=False, default=None)
    _updates: int = field(init=False, default=0)
    _timings: Timings = field(init=False, default_factory=Timings)

    def __post_init__(self) -> None:
        self._position = cast(DataPosition, self.workers.call(DATA, "start", what="start of the data"))

    @property
    @abstractmethod
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""

    @abstractmethod
    def _objective(self) -> Objective:
        """What the next step minimises."""

    def _validation_objective(self) -> Objective:
        """What a validation measures; what the next step minimises, unless a subclass says otherwise."""
        return self._objective()

    def _ready(self, batch: ray.ObjectRef) -> ray.ObjectRef:
        """The batch with everything that the objective reads."""
        return batch

    def _update(self, batch: ray.ObjectRef, what: str) -> dict[str, float]:
        """One optimizer step on the batch; its metrics."""
        return self.policy.train_step(batch, None, self._objective(), what=what)

    def _after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """What follows an optimizer step with these metrics; returns further ones."""
        return {}

    @property
    def total_steps(self) -> int:
        """Optimizer steps."""
        return self.plan.steps

    @property
    def updates(self) -> Mapping[str, int]:
        """Optimizer steps made."""
        return {POLICY: self._updates}

    def start(self) -> None:
        """Make the validation batch."""
        if self.plan.validate_every_steps:
            got = self.workers.call(DATA, "validation", self.plan.validation_examples, what="validation batch")
            self._validation = cast(ray.ObjectRef | None, got)

    def before_first_step(self) -> StepReport:
        """The validation figures before training."""
        return StepReport(self._validate())

    def step(self, step: int) -> StepReport:
        """One optimizer step."""
        with self._timings.part("data"):
            examples = self.plan.examples_per_step
            got = cast(
                DataBatch, self.workers.call(DATA, "batch", self._position, examples, what=f"batch of step {step}")
            )
        batch = self._ready(got.batch)
        with self._timings.part("update"):
            metrics = self._update(batch, f"step {step}")
        self._position = got.position
        self._updates += 1
        metrics |= {"tokens": float(got.tokens), "dropped_examples": float(got.dropped)}
        metrics |= self._after(step, metrics)
        if self.plan.validate_every_steps and step % self.plan.validate_every_steps == 0:
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
        batch = self._ready(self._validation)
        with self._timings.part("validation"):
            metrics = self.policy.loss(batch, self._validation_objective(), "validation")
        return {f"validation/{name}": value for name, value in metrics.items()}
