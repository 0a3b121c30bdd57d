"""Reinforcement learning as a recipe: rollout, advantages, log-probs, updates, weight sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import PolicyGradient
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.order import DataPosition
from nemo_rl_like.observe.terminal import Sample
from nemo_rl_like.observe.timing import Timings
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.rollout.evaluation import EvaluationReport
from nemo_rl_like.rollout.summary import RolloutSummary
from nemo_rl_like.rollout.taskorder import TaskList, TaskOrder
from nemo_rl_like.spec.experiment import RlStageSpec
from nemo_rl_like.training.engine import RunEngine
from nemo_rl_like.training.recipe import StepReport
from nemo_rl_like.training.step_service import AdvantageSpec, PreparedStep

ROLLOUT = "rollout"
STEPS = "steps"


def objective_of(spec: RlStageSpec) -> PolicyGradient:
    """The loss that the stage's algorithm block describes."""
    algorithm = spec.algorithm
    single = spec.updates_per_batch * spec.epochs == 1
    return PolicyGradient(
        policy_loss=algorithm.policy_loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        aggregation=algorithm.aggregation,
        aggregation_length=algorithm.aggregation_length or spec.sampling.max_new_tokens,
        kl_coef=algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        on_policy=single and algorithm.recompute_proximal == "auto",
    )


@dataclass(slots=True)
class RlRecipe:
    """One step: draw prompts, sample groups, make advantages, update, sync the weights.

    `updates_per_batch` x `epochs` optimizer steps a step. With a single one the current log-probs are also the proximal
    ones, so nothing is computed twice; otherwise they are computed once before the first update.
    """

    spec: RlStageSpec
    seed: int
    policy: Policy
    reference: Policy | None
    """Frozen model of the KL term; None when its coefficient is 0."""
    engine: RunEngine
    workers: WorkerGroup
    """Hosts the services `rollout` and `steps`."""
    rollouts: Path | None
    """File that records every episode."""
    _objective: PolicyGradient = field(init=False)
    _order: TaskOrder = field(init=False)
    _position: DataPosition = field(init=False)
    _updates: int = 0
    _recorded: int = 0
    _timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        self._objective = objective_of(self.spec)
        tasks = cast(TaskList, self.workers.call(ROLLOUT, "task_list", "train", what="list of training tasks"))
        self._order = TaskOrder(tasks, self.seed)
        self._position = self._order.start()

    @property
    def total_steps(self) -> int:
        """Rollout batches."""
        return self.spec.steps

    @property
    def updates(self) -> int:
        """Optimizer steps made."""
        return self._updates

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole stage."""
        return self.spec.steps * self.spec.updates_per_batch * self.spec.epochs

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        return ("reward", "eval/accuracy", "loss", "entropy", "grad_norm", "completions/mean_length", "timing/step")

    def start(self) -> None:
        """Bring the policy's weights to the engine and prove that they are there."""
        if not self.engine.sync(self.engine.version):  # the embedded engine's sync has nothing to prove
            self.engine.probe()

    def before_first_step(self) -> StepReport:
        """The validation figures before training, when there are evaluations."""
        return StepReport(self._evaluate() if self.spec.evaluate_every_steps else {})

    def step(self, step: int) -> StepReport:
        """One rollout batch and its updates."""
        batch, summary = self._collect(step)
        prepared = self._prepare(step, batch)
        metrics = {**summary.metrics(), **self._log_probs(prepared), **self._update(prepared, step)}
        with self._timings.part("sync"):
            metrics |= self.engine.sync(self.engine.version + 1)
        if self.spec.evaluate_every_steps and step % self.spec.evaluate_every_steps == 0:
            metrics |= self._evaluate()
        return StepReport({**metrics, **self._timings.collect()}, _shown(summary, prepared.advantages))

    def state(self) -> dict[str, JSON]:
        """Position in the prompts, counters, and the length of the record of episodes."""
        return {
            "position": asdict(self._position),
            "updates": self._updates,
            "version": self.engine.version,
            "recorded": self._recorded,
        }

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave."""
        self._updates = cast(int, state.get("updates", 0))
        self._recorded = cast(int, state.get("recorded", 0))
        self.engine.version = cast(int, state.get("version", 0))
        position = cast(Mapping[str, str | int] | None, state.get("position"))
        if position is not None:
            self._position = DataPosition(str(position["dataset_sha256"]), int(position["consumed"]))

    def _collect(self, step: int) -> tuple[ray.ObjectRef, RolloutSummary]:
        tasks = self._order.draw(self._position, self.spec.prompts_per_step)
        shown = self.spec.show_samples if (step - 1) % self.spec.show_samples_every_steps == 0 else 0
        with self._timings.part("rollout"):
            got = self.workers.call(
                ROLLOUT,
                "collect_to_store",
                step,
                tasks,
                self.spec.samples_per_prompt,
                self.engine.version,
                self.spec.sampling,
                self.engine.client(),
                shown,
                what=f"rollout of step {step}",
            )
        self._position = self._position.advance(len(tasks))
        if self.rollouts is not None:
            got_offset = self.workers.call(ROLLOUT, "append_records", str(self.rollouts), self._recorded)
            self._recorded = cast(int, got_offset)
        return cast(tuple[ray.ObjectRef, RolloutSummary], got)

    def _prepare(self, step: int, batch: ray.ObjectRef) -> _Step:
        algorithm = self.spec.algorithm
        shuffle = self.seed * 1_000_003 + step if algorithm.shuffle_rewards else None
        with self._timings.part("advantages"):
            got = self.workers.call(
                STEPS,
                "prepare",
                batch,
                AdvantageSpec(algorithm.advantage, shuffle),
                self.spec.updates_per_batch,
                self.spec.epochs,
                self.seed * 1_000_003 + step,
                what=f"advantages of step {step}",
            )
        prepared = cast(PreparedStep, got)
        return _Step(prepared.batch, prepared.minibatches, prepared.episode_advantages)

    def _log_probs(self, step: _Step) -> dict[str, float]:
        """Attach proximal and reference log-probs where the objective reads them; the gap metrics if they come from here."""
        metrics: dict[str, float] = {}
        temperature = self.spec.sampling.temperature
        if not self._objective.on_policy:
            with self._timings.part("logprobs"):
                values, metrics = self.policy.logprobs(
                    step.batch, temperature, self.engine.gap_limit(), "proximal log-probs"
                )
                step.batch = self._attach(step.batch, "proximal", values)
        if self.reference is not None:
            with self._timings.part("reference"):
                values, _ = self.reference.logprobs(step.batch, temperature, what="reference log-probs")
                step.batch = self._attach(step.batch, "reference", values)
        return metrics

    def _attach(self, batch: ray.ObjectRef, name: str, values: ray.ObjectRef) -> ray.ObjectRef:
        return cast(ray.ObjectRef, self.workers.call(STEPS, "attach", batch, name, values, what=f"attaching {name}"))

    def _update(self, step: _Step, number: int) -> dict[str, float]:
        gap = self.engine.gap_limit() if self._objective.on_policy else None
        made: list[dict[str, float]] = []
        with self._timings.part("update"):
            for index, rows in enumerate(step.minibatches):
                made.append(
                    self.policy.train_step(
                        step.batch,
                        rows,
                        self._objective,
                        self.spec.sampling.temperature,
                        gap,
                        what=f"update {index + 1} of {len(step.minibatches)} of step {number}",
                    )
                )
                self._updates += 1
        return {name: sum(m[name] for m in made) / len(made) for name in made[0]} | {"lr": made[-1]["lr"]}

    def _evaluate(self) -> dict[str, float]:
        with self._timings.part("evaluate"):
            got = self.workers.call(ROLLOUT, "evaluate", self.spec.evaluation, self.engine.client(), what="evaluation")
        return cast(EvaluationReport, got).metrics()


@dataclass(slots=True)
class _Step:
    """The batch of a step on its way from rollout to update."""

    batch: ray.ObjectRef
    minibatches: tuple[tuple[int, ...] | None, ...]
    advantages: Mapping[int, float]


def _shown(summary: RolloutSummary, advantages: Mapping[int, float]) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            prompt=sample.prompt,
            response=sample.response,
            reward=None if sample.reward != sample.reward else sample.reward,
            advantage=advantages.get(sample.episode_id),
        )
        for sample in summary.samples
    )
