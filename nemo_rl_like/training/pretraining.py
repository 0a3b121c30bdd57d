"""Pretraining as a recipe: a batch of packed rows, one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_like.algorithms.objectives import CrossEntropy, Objective
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.pretrain import PretrainStageSpec
from nemo_rl_like.training.data_recipe import DataPlan, DataRecipe
from nemo_rl_like.training.moving_reference import MovingReference, follow


@dataclass
class PretrainRecipe(DataRecipe):
    """Cross-entropy on every token that another one of its piece predicts."""

    spec: PretrainStageSpec
    average: MovingReference | None = None
    """Moves the average of the weights, where there is one."""

    @classmethod
    def of(
        cls, spec: PretrainStageSpec, policy: Policy, workers: WorkerGroup, average: MovingReference | None = None
    ) -> PretrainRecipe:
        """The recipe of a stage."""
        plan = DataPlan(spec.steps, spec.rows_per_step, spec.validate_every_steps, spec.validation_rows)
        return cls(plan, policy, workers, spec=spec, average=average)

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        return ("loss", "perplexity", "validation/perplexity", "tokens", "lr", "grad_norm", "timing/step")

    def _objective(self) -> Objective:
        return CrossEntropy(z_loss=self.spec.z_loss)

    def _validation_objective(self) -> Objective:
        return CrossEntropy()

    def _after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        follow(self.average, self.spec.ema)
        return {"perplexity": math.exp(metrics["nll"])}

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        if not metrics:
            return {}
        nll = metrics["validation/nll"]
        return {**metrics, "validation/perplexity": math.exp(nll), "validation/negative_loss": -nll}
