"""Supervised loss from logits, token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence


def cross_entropy(
    logits: Sequence[Sequence[float]], targets: Sequence[int], weights: Sequence[float], z_loss: float
) -> float:
    """sum_t w_t (-log p(y_t) + z_loss (log sum_v exp z_tv)^2) / sum_t w_t."""
    total = 0.0
    for row, target, weight in zip(logits, targets, weights, strict=True):
        log_norm = math.log(math.fsum(math.exp(z) for z in row))
        total += weight * (log_norm - row[target] + z_loss * log_norm**2)
    return total / math.fsum(weights)
