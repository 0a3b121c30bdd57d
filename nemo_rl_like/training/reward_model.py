"""Training of a reward model as a recipe: a batch of pairs, ratings or solutions, one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_like.algorithms.objectives import Objective
from nemo_rl_like.algorithms.reward_losses import objective_of
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.training.data_recipe import DataPlan, DataRecipe


@dataclass
class RewardModelRecipe(DataRecipe):
    """The loss of a stage's `loss` block."""

    objective: Objective

    @classmethod
    def of(cls, spec: RewardModelStageSpec, model: Policy, workers: WorkerGroup) -> RewardModelRecipe:
        """The recipe of a stage; `model` has a score head."""
        plan = DataPlan(spec.steps, spec.examples_per_step, spec.validate_every_steps, spec.validation_examples)
        return cls(plan, model, workers, objective=objective_of(spec.loss))

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        quality = self.objective.metric_names[1]
        return ("loss", quality, "validation/loss", f"validation/{quality}", "grad_norm", "timing/step")

    def _objective(self) -> Objective:
        return self.objective
