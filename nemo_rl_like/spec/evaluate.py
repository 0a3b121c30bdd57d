"""The `evaluate` stage: measure on held-out tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.stage import StageBase


class EvaluationSpec(Spec):
    """One evaluation on held-out tasks."""

    split: Literal["validation", "test"] = "test"
    """Which held-out split."""
    tasks: PositiveInt | None = None
    """Number of tasks, from the front of the split; default: all."""
    samples_per_task: NonNegativeInt = 0
    """Samples a task at `temperature` (avg@k); 0 = greedy only."""
    temperature: PositiveFloat = 1.0
    """Temperature of the samples."""
    max_new_tokens: PositiveInt = 256
    """Longest response, in tokens."""


class EvaluateStageSpec(StageBase):
    """Evaluate the checkpoints of earlier stages on held-out tasks."""

    kind: Literal["evaluate"] = "evaluate"
    """Stage kind."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """What to evaluate."""
    checkpoints: tuple[str, ...] = ()
    """Stages whose final checkpoint is evaluated; default: every stage before this one that makes one."""
    show_samples: NonNegativeInt = 5
    """Before/after samples shown at the end."""
