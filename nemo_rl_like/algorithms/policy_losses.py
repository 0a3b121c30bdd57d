"""Policy losses per token, to minimise. Each takes masked-safe [M] tensors and returns [M] losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp, so that a runaway token is finite (e^20 = 4.9e8) in value and gradient."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses [M] and, without gradient, the ratio [M] and where clipping was active below and above, bool [M]."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clip(
    current: Tensor, proximal: Tensor, advantage: Tensor, *, low: float, high: float, dual: float | None = None
) -> PolicyLoss:
    """-min(r A, clip(r, 1-low, 1+high) A), r = exp(current - proximal); never above -dual*A where A < 0.

    Shapes [M]; log-probs in nats. Schulman et al. 2017 (arXiv 1707.06347), eq. 7; dual clip: Ye et al. 2020 (arXiv 1912.09729).
    """
    ratio = (current - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -ratio * advantage
    clipped = -ratio.clamp(1 - low, 1 + high) * advantage
    loss = torch.maximum(unclipped, clipped)
    if dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)
    with torch.no_grad():
        clipped_low = (ratio < 1 - low) & (advantage < 0)
        clipped_high = (ratio > 1 + high) & (advantage > 0)
    return PolicyLoss(loss, ratio.detach(), clipped_low, clipped_high)


def reinforce(current: Tensor, proximal: Tensor, advantage: Tensor) -> PolicyLoss:
    """-A * current. Williams 1992; the ratio is reported, not used. Shapes [M]."""
    ratio = (current - proximal).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(-advantage * current, ratio, never, never)
