"""Preferences between fresh samples: who else answers a prompt, and losses on pairs of answers. Part of an `algorithm` block."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.preference import PreferenceSpec


class ReferenceOpponent(Spec):
    """The frozen model that the stage starts from."""

    kind: Literal["reference"] = "reference"
    """Opponent."""


class MixtureOpponent(Spec):
    """policy^(1 - share) reference^share, normalised: a geometric mixture, token by token."""

    kind: Literal["mixture"] = "mixture"
    """Opponent."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.125
    """Exponent of the reference."""


OpponentSpec = Annotated[ReferenceOpponent | MixtureOpponent, Field(discriminator="kind")]

NOT_ONLINE = ("kto", "bco")
"""Losses that pairs of fresh samples do not have: one judges single completions, the other keeps a mean over the data."""


class OnlinePairsSpec(PreferenceSpec):
    """Preference losses on pairs of fresh samples, judged by their rewards: of each group the best and the worst, or with an
    `opponent` each sample and the opponent's. Equal rewards make no pair."""

    exploration: NonNegativeFloat = 0.0
    """Weight of the log-prob of the opponent's sample, which is minimised (XPO's alpha); needs `opponent`."""

    @model_validator(mode="after")
    def _losses_are_online(self) -> OnlinePairsSpec:
        offline = [kind for kind in self.kinds if kind in NOT_ONLINE]
        if offline:
            raise ValueError(
                f"`pairs.losses` has {offline[0]}, which pairs of fresh samples do not have; use `dpo` or `ipo`"
            )
        return self
