"""The reward model stage, and reward models as judges of rollouts. Equations and papers stand in `algorithms/reward_losses.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec
from nemo_rl_like.spec.stage import CheckpointSpec, PresetStage


class PairwiseReward(Spec):
    """-log sigmoid(s_c - s_r - margin_weight margin) + center (s_c + s_r)^2: an outcome reward model (Bradley-Terry)."""

    kind: Literal["pairwise"] = "pairwise"
    """Loss."""
    margin_weight: NonNegativeFloat = 0.0
    """Weight of the pair's `margin`, by which the scores must differ at least; above 0 every row needs a margin."""
    center: NonNegativeFloat = 0.0
    """Pull of the two scores' sum to 0, so that scores of different prompts are comparable; 0.01 is usual."""


class RegressionReward(Spec):
    """(s - score)^2: an outcome reward model of ratings."""

    kind: Literal["regression"] = "regression"
    """Loss."""


class ProcessReward(Spec):
    """Binary cross-entropy of sigmoid(s) at the end of each step of a solution: a process reward model."""

    kind: Literal["process"] = "process"
    """Loss."""
    separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text that ends each step but the last one, which ends with the message."""


RewardLossSpec = Annotated[PairwiseReward | RegressionReward | ProcessReward, Field(discriminator="kind")]


class RewardDataSpec(Spec):
    """What a reward model learns from."""

    path: str
    """JSONL file. pairwise: {"prompt", "chosen", "rejected", "margin"?}; regression: {"prompt", "completion", "score": number};
    process: {"prompt", "completions": [a text a step], "labels": [true, false or a number from 0 to 1 a step]}."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What is longer than the context is dropped and counted, or stops the run."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the prompts held out for validation."""


class RewardModelStageSpec(PresetStage):
    """Train a model that scores: the start model with its output head replaced by a head of one number."""

    kind: Literal["reward_model"] = "reward_model"
    """Stage kind."""
    data: RewardDataSpec
    """Training data."""
    loss: RewardLossSpec = PairwiseReward()
    """What the score means and how it is learned."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    examples_per_step: PositiveInt = 32
    """Pairs, ratings or solutions in one optimizer step."""
    seed: NonNegativeInt | None = None
    """Of the new head and the order of the data; members of an ensemble differ in it. Default: the experiment's."""
    optimizer: OptimizerSpec = AdamWOptimizer(lr=1e-5)
    """Optimizer and schedule."""
    validate_every_steps: NonNegativeInt = 0
    """Validation every this many steps; 0 = never."""
    validation_examples: PositiveInt = 256
    """Examples of one validation."""
    checkpoint: CheckpointSpec = CheckpointSpec(best_metric="validation/accuracy")
    """Checkpoints of this stage."""
    init_from: str | None = None
    """Stage whose checkpoint this one starts from; default: the stage before it that makes one, or the model."""

    @model_validator(mode="after")
    def _stage_fits(self) -> RewardModelStageSpec:
        self.optimizer.check_updates(self.steps)
        if self.validate_every_steps and not self.data.validation_fraction:
            raise ValueError(
                f"`validate_every_steps` is {self.validate_every_steps}, but `data.validation_fraction` is 0.0 and holds nothing out; "
                "set it above 0 (0.1 is usual), or leave `validate_every_steps` out"
            )
        return self


# -- judges of rollouts


class ProcessScores(Spec):
    """How the step scores of a process reward model become one: each is sigmoid(s), the probability that the step is right."""

    separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text that ends a step, as in the model's training."""
    over_steps: Literal["min", "mean", "product", "last"] = "min"
    """The response's score from those of its steps."""


class RewardModelSpec(Spec):
    """A judge of finished episodes: one reward model, or an ensemble."""

    paths: tuple[str, ...] = ()
    """Hugging Face folders of reward models with the policy's tokenizer (one score a token, ...ForSequenceClassification)."""
    stages: tuple[str, ...] = ()
    """Earlier `reward_model` stages."""
    combine: Literal["mean", "min", "mean_minus_variance"] = "mean"
    """An ensemble's score from its members': their mean, the worst (WCO), or the mean less `variance_weight` times the variance (UWO)."""
    variance_weight: NonNegativeFloat = 0.5
    """Price of disagreement in `mean_minus_variance`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the score in the episode's reward."""
    environment_weight: NonNegativeFloat = 1.0
    """Weight of the environment's own reward beside it; 0: its reward is not trained (but still told as a metric)."""
    process: ProcessScores | None = None
    """The models score steps; default: they score the whole response at its last token."""

    @model_validator(mode="after")
    def _has_members(self) -> RewardModelSpec:
        members = [*self.paths, *self.stages]
        if not members:
            raise ValueError("`reward_model` needs `paths` or `stages`: folders of reward models, or earlier stages")
        twice = sorted({name for name in members if members.count(name) > 1})
        if twice:
            raise ValueError(f"`reward_model` names {twice[0]!r} more than once; an ensemble needs different members")
        if self.combine == "mean_minus_variance" and len(members) < 2:
            raise ValueError(
                f"`combine` is {self.combine}, and one model has no variance; name at least 2 models, or use `combine: mean`"
            )
        return self
