"""Preference optimisation as a recipe: a batch of pairs or judged completions, the reference's log-probs, one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import Objective
from nemo_rl_like.algorithms.preference import objective_of
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.preference import BcoLoss, OrpoLoss, PreferenceStageSpec
from nemo_rl_like.training.data_recipe import DataPlan, DataRecipe
from nemo_rl_like.training.moving_reference import MovingReference
from nemo_rl_like.training.step_services import STEPS


@dataclass
class PreferenceRecipe(DataRecipe):
    """Losses of pairs, or kto."""

    spec: PreferenceStageSpec
    reference: Policy | None
    """Frozen, or moved at the spec's rhythm; None where no loss has a reference."""
    moving: MovingReference | None
    """How it is moved; None: it stays."""
    _mean_log_ratio: float = field(init=False, default=0.0)

    @classmethod
    def of(
        cls,
        spec: PreferenceStageSpec,
        policy: Policy,
        workers: WorkerGroup,
        reference: Policy | None,
        moving: MovingReference | None,
    ) -> PreferenceRecipe:
        """The recipe of a stage. `workers` also host the service `steps`."""
        plan = DataPlan(spec.steps, spec.pairs_per_step, spec.validate_every_steps, spec.validation_pairs)
        return cls(plan, policy, workers, spec=spec, reference=reference, moving=moving)

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        measured = ("kl",) if self.spec.unpaired else ("rewards/accuracies", "validation/rewards/accuracies")
        return ("loss", "rewards/margins", *measured, "validation/loss", "grad_norm", "timing/step")

    def state(self) -> dict[str, JSON]:
        """Also the mean log-ratio of the completions so far, for bco."""
        return {**super().state(), "mean_log_ratio": self._mean_log_ratio}

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave."""
        super().load_state(state)
        self._mean_log_ratio = cast(float, state.get("mean_log_ratio", 0.0))

    def _objective(self) -> Objective:
        return objective_of(self.spec, self._mean_log_ratio)

    def _ready(self, batch: ray.ObjectRef) -> ray.ObjectRef:
        if self.reference is None:
            return batch
        with self._timings.part("reference"):
            values, _ = self.reference.logprobs(batch, 1.0, what="reference log-probs")
            got = self.workers.call(STEPS, "attach", batch, "reference", values, what="attaching reference")
        return cast(ray.ObjectRef, got)

    def _after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        sync = self.spec.reference_sync
        if self.moving is not None and sync is not None and step % sync.every_steps == 0:
            self.moving.move(sync.alpha)
        return self._average(metrics)

    def _average(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the step's completions into the running mean that bco's delta is made of; the delta that the step had."""
        bco = next((loss for loss in self.spec.losses if isinstance(loss, BcoLoss)), None)
        if bco is None:
            return {}
        delta = bco.beta * self._mean_log_ratio
        mean = (metrics["rewards/chosen"] + metrics["rewards/rejected"]) / 2 / _beta(self.spec)
        self._mean_log_ratio += (mean - self._mean_log_ratio) / self._updates
        return {"bco/delta": delta}


def _beta(spec: PreferenceStageSpec) -> float:
    """Of the loss whose rewards are reported: beside bco it has a reference, and so a beta."""
    measured = spec.measured
    if isinstance(measured, OrpoLoss):
        raise ValueError("orpo has no beta, and is not measured where another loss has a reference")
    return measured.beta
