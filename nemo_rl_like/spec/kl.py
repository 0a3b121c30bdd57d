"""KL to the reference, and what steers its coefficient and that of the entropy bonus."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from nemo_rl_like.spec.base import Spec


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
