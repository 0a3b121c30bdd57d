"""Policy losses of the algorithm block, and how they become one number. Equations and papers stand in `algorithms/`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec


class ClipLoss(Spec):
    """-min(r A, clip(r) A), r the ratio of current and proximal probabilities (PPO)."""

    kind: Literal["clip"] = "clip"
    """Policy loss."""
    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio may fall to 1 - low."""
    high: PositiveFloat = 0.2
    """The ratio may rise to 1 + high."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """For negative advantages the loss is never above -dual * A (3 is usual); default: no such limit."""
    delta: Annotated[float, Field(gt=1)] | None = None
    """Cap of the ratio in the branch that is not clipped (two-sided clipping); default: none."""


class ReinforceLoss(Spec):
    """-A log p."""

    kind: Literal["reinforce"] = "reinforce"
    """Policy loss."""


class GspoLoss(Spec):
    """PPO's clipping on one ratio a sequence: exp(mean of the log-ratios)."""

    kind: Literal["gspo"] = "gspo"
    """Policy loss."""
    low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The sequence's ratio may fall to 1 - low."""
    high: PositiveFloat = 4e-4
    """The sequence's ratio may rise to 1 + high."""


class GspoTokenLoss(Spec):
    """GSPO's ratio with a gradient for each token, for advantages that differ inside a sequence."""

    kind: Literal["gspo_token"] = "gspo_token"
    """Policy loss."""
    low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The sequence's ratio may fall to 1 - low."""
    high: PositiveFloat = 4e-4
    """The sequence's ratio may rise to 1 + high."""


class GmpoLoss(Spec):
    """Geometric mean of a sequence's ratios, each log-ratio clipped on the side that PPO would clip."""

    kind: Literal["gmpo"] = "gmpo"
    """Policy loss."""
    low: PositiveFloat = 0.4
    """A log-ratio may fall to -low, in nats."""
    high: PositiveFloat = 0.4
    """A log-ratio may rise to high, in nats."""


class CispoLoss(Spec):
    """-min(r, cap) A log p, no gradient through the ratio."""

    kind: Literal["cispo"] = "cispo"
    """Policy loss."""
    cap: PositiveFloat = 5.0
    """Largest weight; this is not PPO's epsilon."""


class SapoLoss(Spec):
    """-f(r) A with a smooth gate f in the place of clipping."""

    kind: Literal["sapo"] = "sapo"
    """Policy loss."""
    tau_positive: PositiveFloat = 1.0
    """Steepness of the gate where A > 0."""
    tau_negative: PositiveFloat = 1.05
    """Steepness of the gate elsewhere."""


class GpgLoss(Spec):
    """-A log p, scaled by groups / groups that have a gradient."""

    kind: Literal["gpg"] = "gpg"
    """Policy loss."""


class KlCovLoss(Spec):
    """-r A, with a penalty on |log r| at the tokens whose log-prob and advantage vary together the most."""

    kind: Literal["kl_cov"] = "kl_cov"
    """Policy loss."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.002
    """Share of the step's tokens that are penalised, those of largest covariance above 0."""
    coef: PositiveFloat = 1.0
    """Weight of the penalty."""


class ClipCovLoss(Spec):
    """PPO's clipping, and no gradient at some tokens whose log-prob and advantage vary together strongly."""

    kind: Literal["clip_cov"] = "clip_cov"
    """Policy loss."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.0002
    """Share of the step's tokens that lose their gradient, drawn among the eligible ones."""
    cov_low: float = 1.0
    """Smallest covariance of an eligible token."""
    cov_high: float = 5.0
    """Largest covariance of an eligible token."""
    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio may fall to 1 - low."""
    high: PositiveFloat = 0.2
    """The ratio may rise to 1 + high."""


PolicyLossSpec = Annotated[
    ClipLoss
    | ReinforceLoss
    | GspoLoss
    | GspoTokenLoss
    | GmpoLoss
    | CispoLoss
    | SapoLoss
    | GpgLoss
    | KlCovLoss
    | ClipCovLoss,
    Field(discriminator="kind"),
]


SEQUENCE_LOSSES = ("gspo", "gmpo")
"""Policy losses with one value a sequence; they need aggregation `sequence_mean`, which needs one of them."""


class TokenMean(Spec):
    """Sum over tokens / trained tokens of the step."""

    kind: Literal["token_mean"] = "token_mean"
    """Aggregation."""


class SequenceMeanTokenMean(Spec):
    """Mean over sequences of the mean over their tokens."""

    kind: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"
    """Aggregation."""


class SequenceMeanTokenSum(Spec):
    """Mean over sequences of the sum over their tokens."""

    kind: Literal["sequence_mean_token_sum"] = "sequence_mean_token_sum"
    """Aggregation."""


class SequenceMeanTokenSumNorm(Spec):
    """Mean over sequences of the sum over their tokens / a constant length (Dr. GRPO)."""

    kind: Literal["sequence_mean_token_sum_norm"] = "sequence_mean_token_sum_norm"
    """Aggregation."""
    length: PositiveInt | None = None
    """The constant, in tokens; default: sampling.max_new_tokens."""


class SequenceMean(Spec):
    """Mean over sequences of one value a sequence."""

    kind: Literal["sequence_mean"] = "sequence_mean"
    """Aggregation."""


AggregationSpec = Annotated[
    TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | SequenceMeanTokenSumNorm | SequenceMean,
    Field(discriminator="kind"),
]
