"""Reinforcement learning as a recipe: rollout, advantages, log-probs, updates, weight sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import ray

from nemo_rl_like.algorithms import kl
from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.algorithms.value_losses import ValueLoss
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.order import DataPosition
from nemo_rl_like.observe.terminal import Sample
from nemo_rl_like.observe.timing import Timings
from nemo_rl_like.policy.client import CRITIC, POLICY, Policy
from nemo_rl_like.rollout.evaluation import EvaluationReport
from nemo_rl_like.rollout.service import CollectPlan
from nemo_rl_like.rollout.summary import RolloutSummary
from nemo_rl_like.rollout.taskorder import TaskList, TaskOrder
from nemo_rl_like.spec.algorithm import AlgorithmSpec, GaeAdvantage, VapoAdvantage
from nemo_rl_like.spec.experiment import RlStageSpec
from nemo_rl_like.training.engine import RunEngine
from nemo_rl_like.training.recipe import StepReport
from nemo_rl_like.training.step_service import PreparedStep, StepPlan

ROLLOUT = "rollout"
STEPS = "steps"


def objective_of(spec: RlStageSpec, kl_coef: float | None = None) -> PolicyGradient:
    """The loss that the stage's algorithm block describes; `kl_coef` takes the place of the block's.

    A single update of a step takes the current log-probs as proximal ones, unless the advantages read them before.
    """
    algorithm = spec.algorithm
    if kl_coef is not None and kl_coef != algorithm.kl.coef:
        algorithm = algorithm.model_copy(update={"kl": algorithm.kl.model_copy(update={"coef": kl_coef})})
    single = spec.updates_per_batch * spec.epochs == 1 and algorithm.recompute_proximal == "auto"
    return PolicyGradient(
        algorithm,
        max_new_tokens=spec.sampling.max_new_tokens,
        on_policy=single and not algorithm.advantages_read_proximal,
    )


@dataclass(frozen=True, slots=True)
class RlModels:
    """The models of a run; those that the algorithm does not read are None."""

    policy: Policy
    reference: Policy | None = None
    """Frozen model of the KL."""
    teacher: Policy | None = None
    """Model of `distill_coef`."""
    critic: Policy | None = None
    """Model of the values."""


@dataclass(slots=True)
class RlRecipe:
    """One step: draw prompts, sample groups, make advantages, update, sync the weights.

    `updates_per_batch` x `epochs` optimizer steps a step. With a single one the current log-probs are also the proximal
    ones, so nothing is computed twice; otherwise they are computed once before the first update.
    """

    spec: RlStageSpec
    seed: int
    models: RlModels
    engine: RunEngine
    workers: WorkerGroup
    """Hosts the services `rollout` and `steps`."""
    rollouts: Path | None
    """File that records every episode."""
    _kl_coef: float = field(init=False)
    _order: TaskOrder = field(init=False)
    _position: DataPosition = field(init=False)
    _updates: dict[str, int] = field(default_factory=lambda: {POLICY: 0, CRITIC: 0})
    _recorded: int = 0
    _timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        self._kl_coef = self.spec.algorithm.kl.coef
        tasks = cast(TaskList, self.workers.call(ROLLOUT, "task_list", "train", what="list of training tasks"))
        self._order = TaskOrder(tasks, self.seed)
        self._position = self._order.start()

    @property
    def total_steps(self) -> int:
        """Rollout batches."""
        return self.spec.steps

    @property
    def updates(self) -> Mapping[str, int]:
        """Optimizer steps made, by model."""
        return self._updates

    def start_training(self) -> None:
        """Make the optimizers of policy and critic."""
        spec = self.spec
        each = spec.updates_per_batch * spec.epochs
        self.models.policy.start_training(spec.optimizer, (spec.steps - spec.warmup_steps) * each)
        if self.models.critic is not None:
            self.models.critic.start_training(spec.critic_or_default.optimizer, spec.steps * each)

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
        objective = objective_of(self.spec, self._kl_coef)
        batch, metrics, summary = self._collect(step)
        batch, seen = self._log_probs(batch, objective)
        batch = self._values(batch)
        prepared = self._prepare(step, batch, objective.algorithm)
        metrics |= {**seen, **prepared.metrics, **self._update(prepared, step, objective)}
        self._adapt(metrics)
        with self._timings.part("sync"):
            metrics |= self.engine.sync(self.engine.version + 1)
        if self.spec.evaluate_every_steps and step % self.spec.evaluate_every_steps == 0:
            metrics |= self._evaluate()
        return StepReport({**metrics, **self._timings.collect()}, _shown(summary, prepared.episode_advantages))

    def state(self) -> dict[str, JSON]:
        """Position in the prompts, counters, and the length of the record of episodes."""
        return {
            "position": asdict(self._position),
            "updates": dict(self._updates),
            "version": self.engine.version,
            "recorded": self._recorded,
            "kl_coef": self._kl_coef,
        }

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave."""
        self._updates = {POLICY: 0, CRITIC: 0, **cast(Mapping[str, int], state.get("updates", {}))}
        self._recorded = cast(int, state.get("recorded", 0))
        self.engine.version = cast(int, state.get("version", 0))
        self._kl_coef = cast(float, state.get("kl_coef", self.spec.algorithm.kl.coef))
        position = cast(Mapping[str, str | int] | None, state.get("position"))
        if position is not None:
            self._position = DataPosition(str(position["dataset_sha256"]), int(position["consumed"]))

    def _collect(self, step: int) -> tuple[ray.ObjectRef, dict[str, float], RolloutSummary]:
        """The step's groups: those of one rollout, or with dynamic sampling those that have spread, drawn until there are enough."""
        wanted = self.spec.prompts_per_step
        batch, summary = self._rollout(step, wanted, 0)
        metrics = summary.metrics()
        dynamic = self.spec.algorithm.dynamic_sampling
        if dynamic is None:
            return batch, metrics, summary
        parts, kept = self._with_spread([], 0, batch)
        drawn, refills = wanted, 0
        while kept < wanted and refills < dynamic.max_refills:
            more, _ = self._rollout(step, wanted - kept, drawn)
            drawn += wanted - kept
            refills += 1
            parts, kept = self._with_spread(parts, kept, more)
        metrics |= {"dynamic_sampling/kept_groups": float(kept), "dynamic_sampling/drawn_groups": float(drawn)}
        if parts:
            batch = cast(
                ray.ObjectRef, self.workers.call(STEPS, "join", *parts, what=f"joining the rollouts of step {step}")
            )
        return batch, metrics, summary

    def _with_spread(
        self, parts: list[ray.ObjectRef], kept: int, batch: ray.ObjectRef
    ) -> tuple[list[ray.ObjectRef], int]:
        found, count = cast(
            tuple[ray.ObjectRef | None, int], self.workers.call(STEPS, "with_spread", batch, what="dynamic sampling")
        )
        return (parts if found is None else [*parts, found]), kept + count

    def _rollout(self, step: int, prompts: int, first_group: int) -> tuple[ray.ObjectRef, RolloutSummary]:
        tasks = self._order.draw(self._position, prompts)
        shown = self.spec.show_samples if (step - 1) % self.spec.show_samples_every_steps == 0 else 0
        plan = CollectPlan(
            step=step,
            task_ids=tuple(tasks),
            samples_per_prompt=self.spec.samples_per_prompt,
            version=self.engine.version,
            sampling=self.spec.sampling,
            first_group=first_group,
            greedy=self.spec.algorithm.advantage.kind == "remax",
            show=shown,
        )
        with self._timings.part("rollout"):
            got = self.workers.call(
                ROLLOUT, "collect_to_store", plan, self.engine.client(), what=f"rollout of step {step}"
            )
        self._position = self._position.advance(len(tasks))
        if self.rollouts is not None:
            got_offset = self.workers.call(ROLLOUT, "append_records", str(self.rollouts), self._recorded)
            self._recorded = cast(int, got_offset)
        return cast(tuple[ray.ObjectRef, RolloutSummary], got)

    def _prepare(self, step: int, batch: ray.ObjectRef, algorithm: AlgorithmSpec) -> PreparedStep:
        plan = StepPlan(
            algorithm=algorithm,
            max_new_tokens=self.spec.sampling.max_new_tokens,
            updates=self.spec.updates_per_batch,
            epochs=self.spec.epochs,
            seed=self.seed * 1_000_003 + step,
        )
        with self._timings.part("advantages"):
            got = self.workers.call(STEPS, "prepare", batch, plan, what=f"advantages of step {step}")
        return cast(PreparedStep, got)

    def _log_probs(self, batch: ray.ObjectRef, objective: PolicyGradient) -> tuple[ray.ObjectRef, dict[str, float]]:
        """The batch with the log-probs that objective and advantages read; the gap metrics if they come from here."""
        metrics: dict[str, float] = {}
        temperature = self.spec.sampling.temperature
        if not objective.on_policy:
            with self._timings.part("logprobs"):
                values, metrics = self.models.policy.logprobs(
                    batch, temperature, self.engine.gap_limit(), "proximal log-probs"
                )
                batch = self._attach(batch, "proximal", values)
        for name, model in (("reference", self.models.reference), ("teacher", self.models.teacher)):
            if model is not None:
                with self._timings.part(name):
                    values, _ = model.logprobs(batch, temperature, what=f"{name} log-probs")
                    batch = self._attach(batch, name, values)
        return batch, metrics

    def _attach(self, batch: ray.ObjectRef, name: str, values: ray.ObjectRef) -> ray.ObjectRef:
        return cast(ray.ObjectRef, self.workers.call(STEPS, "attach", batch, name, values, what=f"attaching {name}"))

    def _values(self, batch: ray.ObjectRef) -> ray.ObjectRef:
        """The batch with the critic's values, where there is one."""
        critic, advantage = self.models.critic, self.spec.algorithm.advantage
        if critic is None:
            return batch
        ends = isinstance(advantage, GaeAdvantage | VapoAdvantage) and advantage.bootstrap_truncated
        with self._timings.part("values"):
            asked = self.workers.call(STEPS, "with_ends", batch, what="rows for the critic") if ends else batch
            values = critic.values(cast(ray.ObjectRef, asked))
            got = self.workers.call(STEPS, "attach_values", batch, values, ends=ends, what="attaching values")
        return cast(ray.ObjectRef, got)

    def _update(self, step: PreparedStep, number: int, objective: PolicyGradient) -> dict[str, float]:
        """The step's optimizer steps: of the critic, and after its warm-up of the policy."""
        gap = self.engine.gap_limit() if objective.on_policy else None
        value = ValueLoss(self.spec.critic_or_default.value_clip)
        trains_policy = number > self.spec.warmup_steps
        made: list[dict[str, float]] = []
        for index, rows in enumerate(step.minibatches):
            what = f"update {index + 1} of {len(step.minibatches)} of step {number}"
            metrics: dict[str, float] = {}
            if self.models.critic is not None:
                with self._timings.part("critic"):
                    got = self.models.critic.train_step(step.batch, rows, value, what=f"critic's {what}")
                metrics |= {f"value/{name}": got[name] for name in (*value.metric_names, "grad_norm", "lr")}
                self._updates[CRITIC] += 1
            if trains_policy:
                with self._timings.part("update"):
                    temperature = self.spec.sampling.temperature
                    metrics |= self.models.policy.train_step(step.batch, rows, objective, temperature, gap, what=what)
                self._updates[POLICY] += 1
            made.append(metrics)
        rates = {name: value for name, value in made[-1].items() if name in ("lr", "value/lr")}
        return {name: sum(m[name] for m in made) / len(made) for name in made[0]} | rates

    def _adapt(self, metrics: dict[str, float]) -> None:
        """Move the KL's coefficient towards its target, for the next step."""
        spec = self.spec.algorithm.kl
        if spec.coef:
            metrics["kl/coef"] = self._kl_coef
        if spec.adaptive is not None:
            samples = self.spec.prompts_per_step * self.spec.samples_per_prompt
            self._kl_coef = kl.adapted(
                self._kl_coef, metrics["kl/k1"], spec.adaptive.target, spec.adaptive.horizon, samples
            )

    def _evaluate(self) -> dict[str, float]:
        with self._timings.part("evaluate"):
            got = self.workers.call(ROLLOUT, "evaluate", self.spec.evaluation, self.engine.client(), what="evaluation")
        return cast(EvaluationReport, got).metrics()


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
