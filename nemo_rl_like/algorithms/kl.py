"""KL estimators per token from x = current - reference, in nats."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0


def k1(x: Tensor) -> Tensor:
    """x: unbiased, may be negative. Schulman 2020, "Approximating KL divergence"."""
    return x


def k2(x: Tensor) -> Tensor:
    """x^2 / 2: low variance; its gradient is that of the KL."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased and never negative; x is clamped at -20 so that it stays finite."""
    x = x.clamp(min=-MAX_LOG_RATIO)
    return (-x).exp() - 1 + x


LOSS_ESTIMATORS = {"k2": k2, "k3": k3}
