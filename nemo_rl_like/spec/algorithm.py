"""The algorithm block: advantage x policy loss x correction x KL x aggregation x shaping and filters, each a typed choice.

Every choice is a small block with a `kind` and its own numbers; a text in its place is the kind with default numbers. Equations and
papers stand with the functions in `algorithms/`, under the same names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from nemo_rl_like.spec.advantages import AdvantageSpec, GrpoAdvantage
from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.corrections import CORRECTION_WEIGHTS, CorrectionSpec
from nemo_rl_like.spec.kl import AdaptiveEntropySpec, KlSpec
from nemo_rl_like.spec.online import OnlinePairsSpec, OpponentSpec
from nemo_rl_like.spec.policy_losses import SEQUENCE_LOSSES, AggregationSpec, ClipLoss, PolicyLossSpec, TokenMean
from nemo_rl_like.spec.shaping import DynamicSamplingSpec, ReplayFilterSpec, ShapingSpec

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
