"""Advantage estimators of the algorithm block. Equations and papers stand in `algorithms/advantages.py`, under the same names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec

Fraction = Annotated[float, Field(ge=0, le=1)]
Discount = Annotated[float, Field(gt=0, le=1)]


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
