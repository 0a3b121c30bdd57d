"""What differs between trainings: a recipe makes one step; the Trainer does everything around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.observe.terminal import Sample


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step tells: metrics by name and samples to show."""

    metrics: Mapping[str, float]
    samples: Sequence[Sample] = field(default_factory=tuple)


class Recipe(Protocol):
    """One way of training, driven step by step."""

    @property
    def total_steps(self) -> int:
        """Steps from the start to the end."""
        ...

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        ...

    @property
    def updates(self) -> Mapping[str, int]:
        """Optimizer steps made since the start, by trained model."""
        ...

    def start(self) -> None:
        """Get ready after the policy's state is in place (fresh or loaded)."""
        ...

    def before_first_step(self) -> StepReport:
        """What is measured before any training (step 0); an empty report records nothing."""
        ...

    def step(self, step: int) -> StepReport:
        """Make step `step` (from 1)."""
        ...

    def state(self) -> dict[str, JSON]:
        """What a checkpoint must hold beside weights and optimizer, as JSON."""
        ...

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave; an empty mapping is the start."""
        ...
