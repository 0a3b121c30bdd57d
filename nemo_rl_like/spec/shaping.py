"""Changes of the reward, and filters of a step's samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec


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
