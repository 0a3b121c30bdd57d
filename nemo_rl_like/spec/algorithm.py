"""The algorithm block: advantage x policy loss x correction x KL x aggregation x shaping and filters, each a typed choice.

Every choice is a small block with a `kind` and its own numbers; a text in its place is the kind with default numbers. Equations and
papers stand with the functions in `algorithms/`, under the same names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.online import OnlinePairsSpec, OpponentSpec

Fraction = Annotated[float, Field(ge=0, le=1)]
Discount = Annotated[float, Field(gt=0, le=1)]


# -- advantages


class GrpoAdvantage(Spec):
    """(R - mean) / std of the prompt's samples."""

    kind: Literal["grpo"] = "grpo"
    """Estimator."""


class DrGrpoAdvantage(Spec):
    """R - mean of the prompt's samples."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    """Estimator."""


class BatchStdAdvantage(Spec):
    """R - mean of the prompt's samples, divided by the batch's std."""

    kind: Literal["batch_std"] = "batch_std"
    """Estimator."""


class MaxRlAdvantage(Spec):
    """(R - mean) / mean of the prompt's samples; rewards must not be negative."""

    kind: Literal["maxrl"] = "maxrl"
    """Estimator."""


class RlooAdvantage(Spec):
    """R - mean of the prompt's other samples."""

    kind: Literal["rloo"] = "rloo"
    """Estimator."""


class OpoAdvantage(Spec):
    """R - length-weighted mean of the prompt's samples."""

    kind: Literal["opo"] = "opo"
    """Estimator."""


class PassAtKAdvantage(Spec):
    """Advantage of the best of k samples, analytic over all subsets of k of the prompt's samples; rewards above 0 are right answers."""

    kind: Literal["pass_at_k"] = "pass_at_k"
    """Estimator."""
    k: PositiveInt = 4
    """Samples of which the best counts; at most the group's size."""


class GigpoAdvantage(Spec):
    """GRPO over episodes plus GRPO over turns that start from the same state."""

    kind: Literal["gigpo"] = "gigpo"
    """Estimator."""
    gamma: Discount = 0.95
    """Discount of a turn's return, per turn."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the turn-level part."""


class GdpoAdvantage(Spec):
    """Every reward normalised in its group, weighted sum, whitened over the batch."""

    kind: Literal["gdpo"] = "gdpo"
    """Estimator."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of the reward; default: 1 for every part."""


class ReinforceAdvantage(Spec):
    """The reward itself."""

    kind: Literal["reinforce"] = "reinforce"
    """Estimator."""


class ReinforcePpAdvantage(Spec):
    """Discounted token returns, whitened over the batch (REINFORCE++)."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    """Estimator."""
    gamma: Discount = 1.0
    """Discount per trained token."""


class ReinforcePpBaselineAdvantage(Spec):
    """REINFORCE++ on R - mean of the prompt's samples."""

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    """Estimator."""
    gamma: Discount = 1.0
    """Discount per trained token."""


class RemaxAdvantage(Spec):
    """R - reward of the greedy answer; one more answer is generated for each prompt."""

    kind: Literal["remax"] = "remax"
    """Estimator."""


class GaeAdvantage(Spec):
    """Generalized advantage estimation over trained tokens, from a critic (PPO)."""

    kind: Literal["gae"] = "gae"
    """Estimator."""
    gamma: Discount = 1.0
    """Discount per trained token."""
    lam: Fraction = 0.95
    """Lambda of GAE."""
    whiten: bool = True
    """Normalise advantages over the batch; returns are taken before."""
    bootstrap_truncated: bool = False
    """Value after the last token of an episode that was cut: the critic's instead of 0."""


class VapoAdvantage(Spec):
    """GAE with lambda 1 for the critic and a lambda that grows with the length for the policy."""

    kind: Literal["vapo"] = "vapo"
    """Estimator."""
    gamma: Discount = 1.0
    """Discount per trained token."""
    alpha: PositiveFloat = 0.05
    """Policy lambda = 1 - 1 / (alpha * length)."""
    whiten: bool = True
    """Normalise advantages over the batch; returns are taken before."""
    bootstrap_truncated: bool = False
    """Value after the last token of an episode that was cut: the critic's instead of 0."""


AdvantageSpec = Annotated[
    GrpoAdvantage
    | DrGrpoAdvantage
    | BatchStdAdvantage
    | MaxRlAdvantage
    | RlooAdvantage
    | OpoAdvantage
    | PassAtKAdvantage
    | GigpoAdvantage
    | GdpoAdvantage
    | ReinforceAdvantage
    | ReinforcePpAdvantage
    | ReinforcePpBaselineAdvantage
    | RemaxAdvantage
    | GaeAdvantage
    | VapoAdvantage,
    Field(discriminator="kind"),
]
GROUP_RELATIVE = ("grpo", "dr_grpo", "batch_std", "maxrl", "rloo", "opo", "pass_at_k", "gigpo", "gdpo")
"""Advantages that compare the samples of a prompt: they need at least two."""
CRITIC = ("gae", "vapo")
"""Advantages that read a critic's values."""


# -- policy losses


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


# -- correction of the mismatch between engine and trainer


class TisCorrection(Spec):
    """Weight of each token: exp(proximal - behavior), truncated."""

    kind: Literal["tis"] = "tis"
    """Correction."""
    cap: PositiveFloat = 2.0
    """Largest weight (5 is usual for asynchronous training)."""


class IcePopCorrection(Spec):
    """Weight of each token: exp(proximal - behavior) inside a band, 0 outside."""

    kind: Literal["icepop"] = "icepop"
    """Correction."""
    low: NonNegativeFloat = 0.5
    """Smallest weight that counts."""
    high: PositiveFloat = 5.0
    """Largest weight that counts."""


class SequenceTisCorrection(Spec):
    """Weight of each sequence: the product of its tokens' weights, truncated."""

    kind: Literal["sequence_tis"] = "sequence_tis"
    """Correction."""
    cap: PositiveFloat = 2.0
    """Largest weight."""


class SequenceMaskCorrection(Spec):
    """Drops a sequence whose product of weights lies outside a band."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    """Correction."""
    low: NonNegativeFloat = 0.5
    """Smallest product that is kept."""
    high: PositiveFloat = 2.0
    """Largest product that is kept."""


class GeometricMaskCorrection(Spec):
    """Drops a sequence whose geometric mean of weights lies outside a band."""

    kind: Literal["geometric_mask"] = "geometric_mask"
    """Correction."""
    low: NonNegativeFloat = 0.99
    """Smallest mean that is kept."""
    high: PositiveFloat = 1.01
    """Largest mean that is kept."""


class OffPolicyMaskCorrection(Spec):
    """Drops a sequence of negative advantage from which the policy has moved away."""

    kind: Literal["off_policy_mask"] = "off_policy_mask"
    """Correction."""
    delta: NonNegativeFloat = 0.1
    """Largest mean of behavior - current log-probs that is kept, in nats."""


CorrectionSpec = Annotated[
    TisCorrection
    | IcePopCorrection
    | SequenceTisCorrection
    | SequenceMaskCorrection
    | GeometricMaskCorrection
    | OffPolicyMaskCorrection,
    Field(discriminator="kind"),
]
CORRECTION_WEIGHTS = ("tis", "icepop", "sequence_tis")
"""Corrections that weigh; there can be only one. The others mask, and compose."""


# -- KL to the reference


class AdaptiveKlSpec(Spec):
    """Moves the KL's coefficient towards a target."""

    target: PositiveFloat
    """KL per trained token that is aimed at, in nats."""
    horizon: PositiveFloat = 10_000.0
    """Samples over which the coefficient may double."""


class AdaptiveEntropySpec(Spec):
    """Moves the entropy bonus's coefficient by a fixed step, up while the entropy is below its target and down above it."""

    target: PositiveFloat
    """Entropy per trained token that is aimed at, in nats; above it there is no bonus."""
    step: PositiveFloat = 0.005
    """Change of the coefficient from one rollout batch to the next."""


class KlSpec(Spec):
    """KL divergence to the reference model."""

    coef: NonNegativeFloat = 0.0
    """Coefficient; 0 loads no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x, with x = current - reference log-prob."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from each token's reward (then with k1)."""
    unbiased: bool = False
    """In the loss: weigh the estimator by the ratio of current and behavior probabilities, with its gradient."""
    adaptive: AdaptiveKlSpec | None = None
    """Steer the coefficient; default: constant."""

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KlSpec:
        if self.place == "reward" and self.estimator != "k1":
            raise ValueError(
                f"`place: reward` takes the KL from the return and needs `estimator: k1`, got {self.estimator}"
            )
        if self.place == "loss" and self.estimator == "k1" and not self.unbiased:
            raise ValueError(
                "`estimator: k1` in the loss has an expected gradient of 0; use k2 or k3, or `unbiased: true`"
            )
        if self.place == "reward" and self.unbiased:
            raise ValueError("`unbiased` weighs the KL in the loss; with `place: reward` remove it")
        return self


# -- aggregation


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


# -- shaping of rewards, and filters


class OverlongShaping(Spec):
    """Takes up to 1 from the reward over the last tokens before the limit."""

    kind: Literal["overlong"] = "overlong"
    """Shaping."""
    cache: PositiveInt | None = None
    """Tokens before the limit over which the penalty grows from 0 to 1; default: a fifth of the limit."""
    limit: PositiveInt | None = None
    """Sampled tokens at which the penalty is 1; default: sampling.max_new_tokens."""
    coef: PositiveFloat = 1.0
    """Weight of the penalty."""


class StopProperlyShaping(Spec):
    """A truncated response gets a share of its reward, or a fixed negative one."""

    kind: Literal["stop_properly"] = "stop_properly"
    """Shaping."""
    coef: Annotated[float, Field(le=1)] = 0.0
    """In [0, 1]: multiplies the reward; below 0: takes its place."""


class ClipShaping(Spec):
    """Bounds the reward."""

    kind: Literal["clip"] = "clip"
    """Shaping."""
    low: float = -10.0
    """Smallest reward."""
    high: float = 10.0
    """Largest reward."""

    @model_validator(mode="after")
    def _in_order(self) -> ClipShaping:
        if self.low >= self.high:
            raise ValueError(f"`low` is {self.low}, must be below `high` ({self.high})")
        return self


class ScaleShaping(Spec):
    """Multiplies the reward."""

    kind: Literal["scale"] = "scale"
    """Shaping."""
    factor: float = 1.0
    """The factor."""


class LengthPenaltyShaping(Spec):
    """Takes a price for every sampled token."""

    kind: Literal["length_penalty"] = "length_penalty"
    """Shaping."""
    coef: PositiveFloat
    """Reward that one token costs."""
    free_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens without a price."""


class WinRateShaping(Spec):
    """The reward becomes P(better than the opponent's answer to the prompt) - 1/2."""

    kind: Literal["win_rate"] = "win_rate"
    """Shaping."""
    compare: Literal["bradley_terry", "sign"] = "bradley_terry"
    """P from two rewards: sigmoid of their difference, or 1, 1/2 and 0 for more, equal and less."""


ShapingSpec = Annotated[
    OverlongShaping | StopProperlyShaping | ClipShaping | ScaleShaping | LengthPenaltyShaping | WinRateShaping,
    Field(discriminator="kind"),
]


class DynamicSamplingSpec(Spec):
    """Drops groups whose raw scores are all equal, and draws others in their place."""

    max_refills: PositiveInt = 4
    """Further rollouts of one step; a step that is still short after them goes on with what it has."""


class ReplayFilterSpec(Spec):
    """Trains a part of each prompt's samples, chosen by reward (PF-PPO)."""

    rule: Literal["best", "best_random", "best_worst"] = "best_worst"
    """The best alone, the best and random ones, or the best and the worst."""
    keep: PositiveInt = 4
    """Samples a prompt that are kept."""


NOT_WITH_PAIRS = (
    "advantage",
    "policy_loss",
    "correction",
    "kl",
    "aggregation",
    "shaping",
    "dynamic_sampling",
    "replay_filter",
    "mask_truncated",
    "top_entropy",
    "entropy_coef",
    "adaptive_entropy",
    "distill_coef",
    "positive_nll_coef",
    "recompute_proximal",
    "shuffle_rewards",
)
"""Choices that preference losses on pairs do not read."""


class AlgorithmSpec(Spec):
    """What is trained: orthogonal choices, each a kind or a block with a kind and its numbers."""

    preset: str | None = None
    """Named algorithm whose lines these are written over; `nrl algorithms` lists them."""
    advantage: AdvantageSpec = GrpoAdvantage()
    """Advantage estimator."""
    policy_loss: PolicyLossSpec = ClipLoss()
    """Policy loss of a token or sequence."""
    correction: tuple[CorrectionSpec, ...] = ()
    """What corrects for log-probs that differ between engine and trainer; at most one weight, any masks."""
    kl: KlSpec = KlSpec()
    """KL to the reference."""
    aggregation: AggregationSpec = TokenMean()
    """How losses of tokens or sequences become one number."""
    shaping: tuple[ShapingSpec, ...] = ()
    """Changes of the reward, in order."""
    dynamic_sampling: DynamicSamplingSpec | None = None
    """Replace groups without spread; default: keep them."""
    replay_filter: ReplayFilterSpec | None = None
    """Train a part of the samples; default: all."""
    opponent: OpponentSpec | None = None
    """Who else answers every prompt, once for each sample; read by `shaping: win_rate` and by `pairs`."""
    pairs: OnlinePairsSpec | None = None
    """Train on pairs of samples with preference losses, in the place of advantages and a policy loss."""
    mask_truncated: bool = False
    """Leave the tokens of truncated samples out of numerator and denominator."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the step's tokens, those of highest entropy, that have a policy loss; default: all."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus; with `adaptive_entropy` that of the first step."""
    adaptive_entropy: AdaptiveEntropySpec | None = None
    """Let the bonus's coefficient follow the entropy; default: constant."""
    distill_coef: NonNegativeFloat = 0.0
    """Weight of teacher - proximal log-probs that is added to each token's advantage; 0 loads no teacher."""
    positive_nll_coef: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of samples with reward above 0 (VAPO: 0.1)."""
    recompute_proximal: Literal["auto", "always"] = "auto"
    """`auto`: one on-policy update uses current.detach() as proximal log-probs; otherwise they are recomputed before the first update."""
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards inside each step; nothing should be learned."""

    @property
    def advantages_read_proximal(self) -> bool:
        """Whether proximal log-probs are needed before the advantages."""
        return self.distill_coef > 0 or (self.kl.coef > 0 and self.kl.place == "reward")

    @property
    def needs_reference(self) -> bool:
        """Whether a loss or a reward reads the log-probs of the frozen start model."""
        return self.pairs.needs_reference if self.pairs is not None else self.kl.coef > 0

    @model_validator(mode="after")
    def _opponent_is_read(self) -> AlgorithmSpec:
        compared = [i for i, one in enumerate(self.shaping) if one.kind == "win_rate"]
        if compared and compared != [0]:
            raise ValueError(
                "`shaping` has win_rate behind others, and the opponent's reward is not shaped; put it first, once"
            )
        if self.opponent is not None and not (compared or self.pairs):
            raise ValueError(
                "`opponent` is given, but nothing compares with it; add `shaping: [win_rate]` or `pairs`, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _pairs_stand_alone(self) -> AlgorithmSpec:
        if self.pairs is None:
            return self
        if self.pairs.exploration and self.opponent is None:
            raise ValueError(
                "`pairs.exploration` lowers the log-prob of an opponent's samples; give `opponent: reference`"
            )
        defaults = AlgorithmSpec.model_fields
        for name in NOT_WITH_PAIRS:
            if getattr(self, name) != defaults[name].get_default(call_default_factory=True):
                raise ValueError(
                    f"`{name}` is given, but `pairs` trains with preference losses, which do not read it; leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _choices_fit(self) -> AlgorithmSpec:
        per_sequence = self.policy_loss.kind in SEQUENCE_LOSSES
        if per_sequence != (self.aggregation.kind == "sequence_mean"):
            raise ValueError(
                f"`policy_loss` {self.policy_loss.kind} has one value a {'sequence' if per_sequence else 'token'}, but "
                f"`aggregation` is {self.aggregation.kind}; "
                + (
                    "use `aggregation: sequence_mean`"
                    if per_sequence
                    else f"use another aggregation, or one of {', '.join(SEQUENCE_LOSSES)}"
                )
            )
        if per_sequence and self.top_entropy is not None:
            raise ValueError(
                f"`top_entropy` chooses tokens, but `policy_loss` {self.policy_loss.kind} has one value a sequence; use another loss"
            )
        if self.adaptive_entropy is not None and self.entropy_coef < 0:
            raise ValueError(
                f"`entropy_coef` is {self.entropy_coef}, and `adaptive_entropy` starts from it and never goes below 0; make it 0 or more"
            )
        weights = [c.kind for c in self.correction if c.kind in CORRECTION_WEIGHTS]
        if len(weights) > 1:
            raise ValueError(f"`correction` has the weights {' and '.join(weights)}; keep one (masks compose freely)")
        return self
