"""KL estimators per token from x = current - reference, in nats. Schulman 2020, "Approximating KL divergence"."""

from __future__ import annotations

from torch import Tensor

from nemo_rl_like.algorithms.sequences import MAX_LOG_RATIO, bounded_exp


def k1(x: Tensor) -> Tensor:
    """x: unbiased, may be negative; its expected gradient in a loss is 0."""
    return x


def k2(x: Tensor) -> Tensor:
    """x^2 / 2: low variance; its gradient is that of the KL."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased and never negative; x is clamped at -20 so that it stays finite."""
    x = x.clamp(min=-MAX_LOG_RATIO)
    return (-x).exp() - 1 + x


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def loss(estimator: str, current: Tensor, reference: Tensor, behavior: Tensor | None = None) -> Tensor:
    """[M] the KL term of a loss; with `behavior` times exp(current - behavior), gradient included (the unbiased gradient).

    The ratio makes the gradient of an unbiased estimator that of the KL: DeepSeek-V3.2 2025 (arXiv 2512.02556).
    """
    divergence = ESTIMATORS[estimator](current - reference)
    return divergence if behavior is None else bounded_exp(current - behavior) * divergence


def adapted(coef: float, divergence: float, target: float, horizon: float, samples: int) -> float:
    """coef * (1 + clip(KL / target - 1, -.2, .2) * samples / horizon). Ziegler et al. 2019 (arXiv 1909.08593), section 2.2."""
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)
