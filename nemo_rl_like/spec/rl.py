"""The rl stage: batch, algorithm and the models beside the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.advantages import CRITIC, GROUP_RELATIVE, PassAtKAdvantage
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.evaluate import EvaluationSpec
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec
from nemo_rl_like.spec.pretrain import PtxSpec
from nemo_rl_like.spec.reward_model import RewardModelSpec
from nemo_rl_like.spec.stage import CheckpointSpec, SamplingSpec, StageBase


class CriticSpec(Spec):
    """The critic of `gae` and `vapo`: the stage's own start model with a value head of zeros, or a model of its own."""

    path: str | None = None
    """Hugging Face folder to start from, for example a reward model; default: the model that the policy starts from."""
    optimizer: OptimizerSpec = AdamWOptimizer(lr=1e-5)
    """Optimizer and schedule."""
    value_clip: PositiveFloat | None = 0.2
    """How far a value may move from its old one within a step; null: anywhere."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start in which only the critic is trained."""


OwnRanks = Literal["reference", "teacher", "critic", "reward_model"]
"""Models beside the policy that may have ranks of their own."""


class RlStageSpec(StageBase):
    """Reinforcement learning from an environment."""

    kind: Literal["rl"] = "rl"
    """Stage kind."""
    steps: PositiveInt = 100
    """Rollout batches."""
    prompts_per_step: PositiveInt = 8
    """Prompts in one rollout batch."""
    samples_per_prompt: PositiveInt = 8
    """Samples of each prompt: the group size."""
    updates_per_batch: PositiveInt = 1
    """Minibatches of whole groups, one optimizer step each."""
    epochs: PositiveInt = 1
    """Passes over the rollout batch."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling of training rollouts."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """Loss and advantages."""
    loop: str | None = None
    """`file.py:function` or `pkg.mod:function` in the place of the step's dataflow; see docs/one_step.md. Default: the standard one."""
    critic: CriticSpec | None = None
    """The critic of an advantage that reads values; made with its defaults where one is needed."""
    teacher: str | None = None
    """Hugging Face folder of the model whose log-probs `algorithm.distill_coef` adds; the same tokenizer as the policy's."""
    teacher_stage: str | None = None
    """Or: an earlier stage whose checkpoint is that model."""
    reward_model: RewardModelSpec | None = None
    """A judge of finished episodes, beside the environment's own reward or in its place."""
    own_ranks: tuple[OwnRanks, ...] = ()
    """Models on ranks of their own, laid out as the policy's (each reward model of an ensemble has some); the others share the policy's
    ranks, in turn with it."""
    ptx: PtxSpec | None = None
    """Mix the loss of pretraining text into each optimizer step; default: off."""
    optimizer: OptimizerSpec = AdamWOptimizer()
    """Optimizer and schedule."""
    evaluate_every_steps: NonNegativeInt = 0
    """Evaluate on the validation split every this many steps; 0 = never."""
    evaluation: EvaluationSpec | None = None
    """How to evaluate during training."""
    show_samples: NonNegativeInt = 3
    """Sampled responses shown in the terminal now and then."""
    show_samples_every_steps: PositiveInt = 10
    """How often they are shown, in steps."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints of this stage."""
    init_from: str | None = None
    """Stage whose checkpoint this one starts from; default: the stage before it that makes one, or the model."""

    @model_validator(mode="after")
    def _combinations(self) -> RlStageSpec:
        self._check_groups()
        if self.algorithm.opponent is None and any(one.kind == "win_rate" for one in self.algorithm.shaping):
            raise ValueError(
                "`shaping` win_rate compares with an opponent; give `opponent: reference` or `opponent: mixture`"
            )
        if self.teacher is not None and self.teacher_stage is not None:
            raise ValueError("`teacher` and `teacher_stage` are both given; leave one of them out")
        if (self.algorithm.distill_coef > 0) != self.has_teacher:
            raise ValueError(
                "`algorithm.distill_coef` above 0 and `teacher` (or `teacher_stage`) go together: give both, or neither"
            )
        self._check_own_ranks()
        self._check_judge_weights()
        if self.updates_per_batch > self.prompts_per_step:
            raise ValueError(
                f"`updates_per_batch` is {self.updates_per_batch}, more than the {self.prompts_per_step} groups of `prompts_per_step`"
            )
        if self.evaluate_every_steps and self.evaluation is None:
            raise ValueError("`evaluate_every_steps` needs an `evaluation` block")
        updates = self.updates_per_batch * self.epochs
        self.optimizer.check_updates((self.steps - self.warmup_steps) * updates)
        if self.needs_critic:
            self.critic_or_default.optimizer.check_updates(self.steps * updates)
        return self

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher's log-probs are asked for."""
        return self.teacher is not None or self.teacher_stage is not None

    @property
    def models_beside(self) -> dict[OwnRanks, int]:
        """How many models of each role the stage has beside the policy."""
        judges = 0 if self.reward_model is None else len(self.reward_model.paths) + len(self.reward_model.stages)
        return {
            "reference": int(self.algorithm.needs_reference or self.algorithm.opponent is not None),
            "teacher": int(self.has_teacher),
            "critic": int(self.needs_critic),
            "reward_model": judges,
        }

    def _check_own_ranks(self) -> None:
        """Raise ValueError for ranks of a model that the stage does not have, or that must be beside the policy."""
        for name in self.own_ranks:
            if not self.models_beside[name]:
                raise ValueError(f"`own_ranks` has {name}, but the stage has none; leave it out")
        if "reference" in self.own_ranks and self.algorithm.opponent is not None:
            raise ValueError(
                "`own_ranks` has reference, but an `opponent` is decoded on policy and reference together; leave it out"
            )

    def _check_judge_weights(self) -> None:
        """Raise ValueError for weights of a sum that gdpo never makes: it normalises each part of the reward by itself."""
        judge = self.reward_model
        if self.algorithm.advantage.kind != "gdpo" or judge is None:
            return
        for name, value in (("weight", judge.weight), ("environment_weight", judge.environment_weight)):
            if value != 1:
                raise ValueError(
                    f"`reward_model.{name}` is {value}, but advantage `gdpo` normalises each part of the reward and has weights of its own; "
                    "leave it out and give `advantage.weights` (the judge's part is `reward_model`)"
                )

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage reads a critic's values."""
        return self.algorithm.advantage.kind in CRITIC

    @property
    def critic_or_default(self) -> CriticSpec:
        """The critic's block, or its defaults."""
        return self.critic or CriticSpec()

    @property
    def warmup_steps(self) -> int:
        """Steps at the start in which the policy stays as it is."""
        return self.critic_or_default.warmup_steps if self.needs_critic else 0

    def _check_groups(self) -> None:
        """Raise ValueError unless a prompt has as many samples as the algorithm compares."""
        advantage, samples = self.algorithm.advantage, self.samples_per_prompt
        pairs, alone = self.algorithm.pairs, samples < 2
        if pairs is not None and self.algorithm.opponent is None and alone:
            raise ValueError(
                f"`samples_per_prompt` is {samples}, but `pairs` compares samples of one prompt and needs at least 2 (or an `opponent`)"
            )
        if pairs is None and advantage.kind in GROUP_RELATIVE and alone:
            raise ValueError(
                f"`samples_per_prompt` is {samples}, but advantage `{advantage.kind}` compares samples of one prompt and needs at "
                "least 2 (8 is usual; `reinforce` works with 1)"
            )
        if isinstance(advantage, PassAtKAdvantage) and advantage.k > samples:
            raise ValueError(f"`advantage.k` is {advantage.k}, more than the {samples} of `samples_per_prompt`")
        if self.critic is not None and not self.needs_critic:
            raise ValueError(
                f"`critic` is given, but advantage `{advantage.kind}` reads no values; remove it, or use {' or '.join(CRITIC)}"
            )
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"`critic.warmup_steps` is {self.warmup_steps}, must be below the stage's {self.steps} `steps`"
            )
        kept = self.algorithm.replay_filter
        if kept is not None and kept.keep > samples:
            raise ValueError(f"`replay_filter.keep` is {kept.keep}, more than the {samples} of `samples_per_prompt`")
