"""Supervised fine-tuning as a recipe: a batch of examples, one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import CrossEntropy, Objective
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.sft import SftStageSpec
from nemo_rl_like.training.data_recipe import DataPlan, DataRecipe
from nemo_rl_like.training.moving_reference import MovingReference, follow
from nemo_rl_like.training.ptx import Ptx, next_of


@dataclass
class SftRecipe(DataRecipe):
    """Cross-entropy on assistant tokens."""

    spec: SftStageSpec
    average: MovingReference | None = None
    """Moves the average of the weights, where there is one."""
    ptx: Ptx | None = None
    """Text whose loss is added."""

    @classmethod
    def of(
        cls,
        spec: SftStageSpec,
        policy: Policy,
        workers: WorkerGroup,
        average: MovingReference | None = None,
        ptx: Ptx | None = None,
    ) -> SftRecipe:
        """The recipe of a stage."""
        plan = DataPlan(spec.steps, spec.examples_per_step, spec.validate_every_steps, spec.validation_examples)
        return cls(plan, policy, workers, spec=spec, average=average, ptx=ptx)

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        return ("loss", "validation/loss", "lr", "grad_norm", "timing/step")

    def _objective(self) -> Objective:
        return CrossEntropy(dynamic=self.spec.loss == "dft", z_loss=self.spec.z_loss)

    def state(self) -> dict[str, JSON]:
        """Also the position in the text."""
        return super().state() if self.ptx is None else {**super().state(), "ptx": self.ptx.state()}

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave."""
        super().load_state(state)
        if self.ptx is not None and "ptx" in state:
            self.ptx.load_state(cast(Mapping[str, JSON], state["ptx"]))

    def _train(self, step: int, batch: ray.ObjectRef) -> dict[str, float]:
        auxiliary = next_of(self.ptx)
        return self.policy.train_step(batch, None, self._objective(), what=f"step {step}", auxiliary=auxiliary)

    def _after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        follow(self.average, self.spec.ema)
        return {}

    def _validation_objective(self) -> Objective:
        return CrossEntropy()
