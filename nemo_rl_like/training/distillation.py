"""Distillation as a recipe: examples, some answered by the student, what the teachers say of them, one optimizer step, a weight sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import ray

from nemo_rl_like.algorithms.distillation import Distillation
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.policy.top import TopK
from nemo_rl_like.spec.distill import DistillStageSpec
from nemo_rl_like.training.data_recipe import DATA, DataPlan, DataRecipe
from nemo_rl_like.training.data_service import DataBatch
from nemo_rl_like.training.distillation_service import MixedBatch, MixedPlan
from nemo_rl_like.training.engine import RunEngine


@dataclass(frozen=True, slots=True)
class Teachers:
    """The frozen models, and what they are asked."""

    models: tuple[Policy, ...]
    """By number; empty where their log-probs are stored."""
    asked: TopK

    def top_logprobs(self, batch: ray.ObjectRef) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
        """References to ids and log-probs [N, K] of each teacher, 0 on the others' rows."""
        several = len(self.models) > 1
        told = [
            model.top_logprobs(
                batch, replace(self.asked, teacher=number if several else None), f"{model.service}'s log-probs"
            )
            for number, model in enumerate(self.models)
        ]
        return [ids for ids, _ in told], [logprobs for _, logprobs in told]


@dataclass
class DistillationRecipe(DataRecipe):
    """The generalized Jensen-Shannon divergence from teachers."""

    spec: DistillStageSpec
    teachers: Teachers
    engine: RunEngine | None
    """Samples the student's responses; None where none are."""
    _sampled: Mapping[str, float] = field(init=False, default_factory=dict)

    @classmethod
    def of(
        cls, spec: DistillStageSpec, policy: Policy, workers: WorkerGroup, teachers: Teachers, engine: RunEngine | None
    ) -> DistillationRecipe:
        """The recipe of a stage."""
        plan = DataPlan(spec.steps, spec.examples_per_step, spec.validate_every_steps, spec.validation_examples)
        return cls(plan, policy, workers, spec=spec, teachers=teachers, engine=engine)

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        return ("loss", "kl/forward", "kl/reverse", "agreement", "validation/loss", "grad_norm", "timing/step")

    def start(self) -> None:
        """Bring the weights to the engine and prove it; ask the teachers about the validation batch, once."""
        if self.engine is not None and not self.engine.sync(self.engine.version):
            self.engine.probe()
        super().start()
        if self._validation is not None:
            self._validation = self._with_teachers(self._validation)

    def state(self) -> dict[str, JSON]:
        """Also the engine's weight version."""
        return {**super().state(), "version": 0 if self.engine is None else self.engine.version}

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave."""
        super().load_state(state)
        if self.engine is not None:
            self.engine.version = cast(int, state.get("version", 0))

    def _objective(self) -> Distillation:
        return Distillation(self.spec)

    def _draw(self, step: int) -> DataBatch:
        made = super()._draw(step) if self.engine is None else self._mixed(step, self.engine)
        return replace(made, batch=self._with_teachers(made.batch))

    def _mixed(self, step: int, engine: RunEngine) -> DataBatch:
        spec = self.spec
        plan = MixedPlan(step, spec.examples_per_step, spec.sampled_per_step, engine.version, spec.sampling)
        with self._timings.part("rollout"):
            got = self.workers.call(
                DATA, "mixed", self._position, plan, engine.client(), what=f"responses of step {step}"
            )
        mixed = cast(MixedBatch, got)
        self._sampled = mixed.metrics
        return mixed.made

    def _with_teachers(self, batch: ray.ObjectRef) -> ray.ObjectRef:
        if not self.teachers.models:
            return batch
        with self._timings.part("teacher"):
            told: Sequence[Sequence[ray.ObjectRef]] = self.teachers.top_logprobs(batch)
            got = self.workers.call(DATA, "attach", batch, *told, what="attaching the teachers' log-probs")
        return cast(ray.ObjectRef, got)

    def _train(self, step: int, batch: ray.ObjectRef) -> dict[str, float]:
        spec = self.spec
        comparable = self.engine is not None and spec.sampling.temperature == spec.temperature
        gap = self.engine.gap_limit() if self.engine is not None and comparable else None
        return self.policy.train_step(batch, None, self._objective(), spec.temperature, gap, what=f"step {step}")

    def _measure(self, batch: ray.ObjectRef) -> dict[str, float]:
        return self.policy.loss(batch, self._objective(), "validation", self.spec.temperature)

    def _after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        if self.engine is None:
            return {}
        with self._timings.part("sync"):
            synced = self.engine.sync(self.engine.version + 1)
        return {**self._sampled, **synced}
