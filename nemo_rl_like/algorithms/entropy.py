"""Adaptive entropy: the bonus's coefficient follows the entropy that the last step had."""

from __future__ import annotations

from nemo_rl_like.spec.kl import AdaptiveEntropySpec


def adapted(level: float, entropy: float, options: AdaptiveEntropySpec) -> float:
    """c + step where the entropy is below its target, c - step above it, never below 0; `entropy` in nats a token.

    He et al. 2025 (Skywork-OR1, arXiv 2505.22312), section 3.2.5.
    """
    change = options.step if entropy < options.target else -options.step if entropy > options.target else 0.0
    return max(0.0, level + change)


def active(level: float, entropy: float, options: AdaptiveEntropySpec) -> float:
    """The coefficient of the next step: c where the entropy is at most its target, else 0."""
    return level if entropy <= options.target else 0.0
