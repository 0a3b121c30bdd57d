"""`StepServices`: what a step of reinforcement learning is made of, as calls that a dataflow composes.

Batches are references: token tensors go from worker to worker, never through the process that composes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import Objective
from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.algorithms.preference import Preference
from nemo_rl_like.algorithms.value_losses import ValueLoss
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.order import DataPosition
from nemo_rl_like.observe.timing import Timings
from nemo_rl_like.policy.client import CRITIC, POLICY, Policy
from nemo_rl_like.policy.gap import GapLimit
from nemo_rl_like.rollout.collected import CollectPlan
from nemo_rl_like.rollout.summary import RolloutSummary
from nemo_rl_like.rollout.taskorder import TaskList, TaskOrder
from nemo_rl_like.spec.advantages import GaeAdvantage, VapoAdvantage
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.tokens.routes import ROUTES
from nemo_rl_like.training.engine import EngineClient, RunEngine
from nemo_rl_like.training.ptx import Ptx, next_of
from nemo_rl_like.training.step_service import PreparedStep, StepPlan

ROLLOUT = "rollout"
STEPS = "steps"


def objective_of(spec: RlStageSpec, kl_coef: float | None = None, entropy_coef: float | None = None) -> PolicyGradient:
    """The loss that the stage's algorithm block describes; `kl_coef` and `entropy_coef` take the place of the block's.

    A single update of a step takes the current log-probs as proximal ones, unless the advantages read them before.
    """
    algorithm = spec.algorithm
    if kl_coef is not None and kl_coef != algorithm.kl.coef:
        algorithm = algorithm.model_copy(update={"kl": algorithm.kl.model_copy(update={"coef": kl_coef})})
    if entropy_coef is not None:
        algorithm = algorithm.model_copy(update={"entropy_coef": entropy_coef})
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
    judges: tuple[Policy, ...] = ()
    """Reward models of `reward_model`."""
    opponent: EngineClient | None = None
    """Samples the answers that the policy's are compared with."""


@dataclass(slots=True)
class StepServices:
    """The services of one step, and the counters that a checkpoint keeps of them.

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
    ptx: Ptx | None = None
    """Text whose loss is added to each of the policy's updates."""
    kl_coef: float = field(init=False)
    """Coefficient of the KL in the next step."""
    entropy_coef: float = field(init=False)
    """Coefficient of the entropy bonus in the next step."""
    entropy_level: float = field(init=False)
    """What `adaptive_entropy` moves; the coefficient is this or 0."""
    updates: dict[str, int] = field(default_factory=lambda: {POLICY: 0, CRITIC: 0})
    """Optimizer steps made, by model."""
    timings: Timings = field(default_factory=Timings)
    _order: TaskOrder = field(init=False)
    _position: DataPosition = field(init=False)
    _recorded: int = 0

    def __post_init__(self) -> None:
        self.kl_coef = self.spec.algorithm.kl.coef
        self.entropy_coef = self.entropy_level = self.spec.algorithm.entropy_coef
        tasks = cast(TaskList, self.workers.call(ROLLOUT, "task_list", "train", what="list of training tasks"))
        self._order = TaskOrder(tasks, self.seed)
        self._position = self._order.start()

    @property
    def objective(self) -> PolicyGradient:
        """The loss of the next step."""
        return objective_of(self.spec, self.kl_coef, self.entropy_coef)

    def start_training(self) -> None:
        """Make the optimizers of policy and critic."""
        spec = self.spec
        each = spec.updates_per_batch * spec.epochs
        self.models.policy.start_training(spec.optimizer, (spec.steps - spec.warmup_steps) * each)
        if self.models.critic is not None:
            self.models.critic.start_training(spec.critic_or_default.optimizer, spec.steps * each)

    def state(self) -> dict[str, JSON]:
        """Position in the prompts and in `ptx`'s text, counters, and the length of the record of episodes."""
        state: dict[str, JSON] = {
            "position": asdict(self._position),
            "updates": dict(self.updates),
            "version": self.engine.version,
            "recorded": self._recorded,
            "kl_coef": self.kl_coef,
            "entropy_coef": self.entropy_coef,
            "entropy_level": self.entropy_level,
        }
        return state if self.ptx is None else {**state, "ptx": self.ptx.state()}

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave; an empty mapping is the start."""
        self.updates = {POLICY: 0, CRITIC: 0, **cast(Mapping[str, int], state.get("updates", {}))}
        self._recorded = cast(int, state.get("recorded", 0))
        self.engine.version = cast(int, state.get("version", 0))
        self.kl_coef = cast(float, state.get("kl_coef", self.spec.algorithm.kl.coef))
        start = self.spec.algorithm.entropy_coef
        self.entropy_coef = cast(float, state.get("entropy_coef", start))
        self.entropy_level = cast(float, state.get("entropy_level", start))
        position = cast(Mapping[str, str | int] | None, state.get("position"))
        if position is not None:
            self._position = DataPosition(str(position["dataset_sha256"]), int(position["consumed"]))
        if self.ptx is not None and "ptx" in state:
            self.ptx.load_state(cast(Mapping[str, JSON], state["ptx"]))

    def rollout(self, step: int, prompts: int, first_group: int = 0) -> tuple[ray.ObjectRef, RolloutSummary]:
        """Draw the next `prompts`, sample a group of each with the engine, and grade them.

        `first_group` numbers the groups from there: a step that is rolled out in parts counts on.
        """
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
        in_parts = self.models.judges or self.models.opponent is not None
        made = self._in_parts(step, plan) if in_parts else self._collected(step, plan)
        self._position = self._position.advance(len(tasks))
        if self.rollouts is not None:
            got_offset = self.workers.call(ROLLOUT, "append_records", str(self.rollouts), self._recorded)
            self._recorded = cast(int, got_offset)
        return made

    def _collected(self, step: int, plan: CollectPlan) -> tuple[ray.ObjectRef, RolloutSummary]:
        """The plan's episodes with the environment's rewards."""
        with self.timings.part("rollout"):
            got = self.workers.call(
                ROLLOUT, "collect_to_store", plan, self.engine.client(), what=f"rollout of step {step}"
            )
        return cast(tuple[ray.ObjectRef, RolloutSummary], got)

    def _in_parts(self, step: int, plan: CollectPlan) -> tuple[ray.ObjectRef, RolloutSummary]:
        """The plan's episodes, the opponent's beside them, and the scores of the reward models in the rewards of all."""
        with self.timings.part("rollout"):
            self.workers.call(ROLLOUT, "sample", plan, self.engine.client(), what=f"rollout of step {step}")
            if self.models.opponent is not None:
                what = f"opponent's rollout of step {step}"
                self.workers.call(ROLLOUT, "sample_opponent", self.models.opponent, what=what)
        judge = self.spec.reward_model
        if judge is None:
            got = self.workers.call(ROLLOUT, "batch_to_store", what=f"batch of step {step}")
            return cast(tuple[ray.ObjectRef, RolloutSummary], got)
        with self.timings.part("reward_model"):
            rows = cast(
                ray.ObjectRef | None,
                self.workers.call(ROLLOUT, "rows_to_score", judge.process, what="rows for the reward model"),
            )
            scores = [] if rows is None else [model.values(rows, what="scores") for model in self.models.judges]
            got = self.workers.call(ROLLOUT, "judged_to_store", judge, rows, *scores, what="judged episodes")
        return cast(tuple[ray.ObjectRef, RolloutSummary], got)

    def groups_with_spread(self, batch: ray.ObjectRef) -> tuple[ray.ObjectRef | None, int]:
        """The groups whose raw scores are not constant, and their number; None if there is none."""
        got = self.workers.call(STEPS, "with_spread", batch, what="dynamic sampling")
        return cast(tuple[ray.ObjectRef | None, int], got)

    def join(self, *batches: ray.ObjectRef) -> ray.ObjectRef:
        """One batch of all the rows; their groups must differ."""
        return cast(ray.ObjectRef, self.workers.call(STEPS, "join", *batches, what="joining rollouts"))

    def select_groups(self, batch: ray.ObjectRef, low: float, high: float) -> tuple[ray.ObjectRef | None, int]:
        """The groups whose mean raw score is inside [low, high], and their number; None if there is none."""
        got = self.workers.call(STEPS, "select_groups", batch, low, high, what="choice of groups")
        return cast(tuple[ray.ObjectRef | None, int], got)

    def log_probs(self, batch: ray.ObjectRef) -> tuple[ray.ObjectRef, dict[str, float]]:
        """The batch with the log-probs that objective and advantages read; the gap metrics if they come from here."""
        metrics: dict[str, float] = {}
        temperature = self.spec.sampling.temperature
        if not self.objective.on_policy:
            with self.timings.part("logprobs"):
                batch, metrics = self._first_pass(batch)
        reference = self.models.reference if self.spec.algorithm.kl.coef else None
        for name, model in (("reference", reference), ("teacher", self.models.teacher)):
            if model is not None:
                with self.timings.part(name):
                    values, _ = model.logprobs(batch, temperature, what=f"{name} log-probs")
                    batch = self._attach(batch, name, values)
        return batch, metrics

    def _first_pass(self, batch: ray.ObjectRef) -> tuple[ray.ObjectRef, dict[str, float]]:
        """The batch with proximal log-probs and, to be replayed, the experts of each token; the gap metrics."""
        policy, temperature, what = self.models.policy, self.spec.sampling.temperature, "proximal log-probs"
        if not policy.replays:
            values, metrics = policy.logprobs(batch, temperature, self.engine.gap_limit(), what)
            return self._attach(batch, "proximal", values), metrics
        values, routes, metrics = policy.logprobs_and_routes(batch, temperature, self.engine.gap_limit(), what)
        return self._attach(self._attach(batch, "proximal", values), ROUTES, routes), metrics

    def _attach(self, batch: ray.ObjectRef, name: str, values: ray.ObjectRef) -> ray.ObjectRef:
        return cast(ray.ObjectRef, self.workers.call(STEPS, "attach", batch, name, values, what=f"attaching {name}"))

    def pairs(self, batch: ray.ObjectRef) -> tuple[ray.ObjectRef | None, dict[str, float]]:
        """Pairs of the last rollout's samples with their reference log-probs, or None if no two differ; their number, and the gap
        metrics of the rollout's `batch` if they come from here."""
        got = self.workers.call(ROLLOUT, "pairs_to_store", what="pairs")
        pairs, count = cast(tuple[ray.ObjectRef | None, int], got)
        metrics = {"pairs": float(count)}
        temperature = self.spec.sampling.temperature
        if not self._pairs_show_gap:
            with self.timings.part("logprobs"):
                limit = self.engine.gap_limit()
                metrics |= self.models.policy.logprobs(batch, temperature, limit, "log-probs of the rollout")[1]
        if pairs is not None and self.models.reference is not None:
            with self.timings.part("reference"):
                values, _ = self.models.reference.logprobs(pairs, temperature, what="reference log-probs")
                pairs = self._attach(pairs, "reference", values)
        return pairs, metrics

    @property
    def _pairs_show_gap(self) -> bool:
        """Whether the step's only update sees nothing but tokens that this policy's engine sampled."""
        return self.spec.updates_per_batch * self.spec.epochs == 1 and self.models.opponent is None

    def update_on_pairs(self, step: int, pairs: ray.ObjectRef) -> dict[str, float]:
        """The step's optimizer steps on pairs; the means of their metrics."""
        spec = self.spec.algorithm.pairs
        assert spec is not None  # only its dataflow makes pairs
        objective = Preference(spec, exploration=spec.exploration)
        gap = self.engine.gap_limit() if self._pairs_show_gap else None
        shape = (self.spec.updates_per_batch, self.spec.epochs, self._step_seed(step))
        rows_of = self.workers.call(STEPS, "minibatches", pairs, *shape, what=f"minibatches of step {step}")
        made = [
            self._train_policy(pairs, rows, objective, gap, f"step {step}")
            for rows in cast(Sequence[Sequence[int] | None], rows_of)
        ]
        return {name: sum(m[name] for m in made) / len(made) for name in made[0]} | {"lr": made[-1]["lr"]}

    def _train_policy(
        self,
        batch: ray.ObjectRef,
        rows: Sequence[int] | None,
        objective: Objective,
        gap: GapLimit | None,
        what: str,
    ) -> dict[str, float]:
        """One optimizer step of the policy, with the next text of `ptx` where there is any."""
        with self.timings.part("update"):
            temperature, further = self.spec.sampling.temperature, next_of(self.ptx)
            got = self.models.policy.train_step(batch, rows, objective, temperature, gap, what=what, auxiliary=further)
        self.updates[POLICY] += 1
        return got

    def _step_seed(self, step: int) -> int:
        """Of everything that is drawn in a step but samples."""
        return self.seed * 1_000_003 + step

    def values(self, batch: ray.ObjectRef) -> ray.ObjectRef:
        """The batch with the critic's values, where there is one."""
        critic, advantage = self.models.critic, self.spec.algorithm.advantage
        if critic is None:
            return batch
        ends = isinstance(advantage, GaeAdvantage | VapoAdvantage) and advantage.bootstrap_truncated
        with self.timings.part("values"):
            asked = self.workers.call(STEPS, "with_ends", batch, what="rows for the critic") if ends else batch
            values = critic.values(cast(ray.ObjectRef, asked))
            got = self.workers.call(STEPS, "attach_values", batch, values, ends, what="attaching values")
        return cast(ray.ObjectRef, got)

    def advantages(self, step: int, batch: ray.ObjectRef) -> PreparedStep:
        """Filters, shaping and advantages, and the rows of each update."""
        plan = StepPlan(
            algorithm=self.objective.algorithm,
            max_new_tokens=self.spec.sampling.max_new_tokens,
            updates=self.spec.updates_per_batch,
            epochs=self.spec.epochs,
            seed=self._step_seed(step),
        )
        with self.timings.part("advantages"):
            got = self.workers.call(STEPS, "prepare", batch, plan, what=f"advantages of step {step}")
        return cast(PreparedStep, got)

    def update(self, step: int, prepared: PreparedStep) -> dict[str, float]:
        """The step's optimizer steps: of the critic, and after its warm-up of the policy."""
        objective = self.objective
        gap = self.engine.gap_limit() if objective.on_policy else None
        value = ValueLoss(self.spec.critic_or_default.value_clip)
        trains_policy = step > self.spec.warmup_steps
        made: list[dict[str, float]] = []
        for index, rows in enumerate(prepared.minibatches):
            what = f"update {index + 1} of {len(prepared.minibatches)} of step {step}"
            metrics: dict[str, float] = {}
            if self.models.critic is not None:
                with self.timings.part("critic"):
                    got = self.models.critic.train_step(prepared.batch, rows, value, what=f"critic's {what}")
                metrics |= {f"value/{name}": got[name] for name in (*value.metric_names, "grad_norm", "lr")}
                self.updates[CRITIC] += 1
            if trains_policy:
                metrics |= self._train_policy(prepared.batch, rows, objective, gap, what)
            made.append(metrics)
        rates = {name: value for name, value in made[-1].items() if name in ("lr", "value/lr")}
        return {name: sum(m[name] for m in made) / len(made) for name in made[0]} | rates
