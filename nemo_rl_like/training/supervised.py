"""Supervised fine-tuning as a recipe: a batch of examples, one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_like.algorithms.objectives import CrossEntropy, Objective
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.experiment import SftStageSpec
from nemo_rl_like.training.data_recipe import DataPlan, DataRecipe


@dataclass
class SftRecipe(DataRecipe):
    """Cross-entropy on assistant tokens."""

    spec: SftStageSpec

    @classmethod
    def of(cls, spec: SftStageSpec, policy: Policy, workers: WorkerGroup) -> SftRecipe:
        """The recipe of a stage."""
        plan = DataPlan(spec.steps, spec.examples_per_step, spec.validate_every_steps, spec.validation_examples)
        return cls(plan, policy, workers, spec=spec)

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        return ("loss", "validation/loss", "lr", "grad_norm", "timing/step")

    def _objective(self) -> Objective:
        return CrossEntropy(dynamic=self.spec.loss == "dft")

    def _validation_objective(self) -> Objective:
        return CrossEntropy()
