"""`Scored`: the scored tokens of a forward pass with what the loss reads of them, and sums over their sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """M tokens. All tokens of a sequence (an episode) are in the same pass when a loss or correction looks at sequences."""

    current: Tensor
    """[M] log-probs with gradient, in nats."""
    proximal: Tensor
    """[M] log-probs before the step's first update, without gradient."""
    advantage: Tensor
    """[M]"""
    sequence: Tensor
    """int64 [M] number of the token's sequence, in 0..sequences-1."""
    lengths: Tensor
    """[sequences] trained tokens of each sequence."""
    values: Mapping[str, Tensor]
    """[M] further values by name."""

    @property
    def log_ratio(self) -> Tensor:
        """[M] current - proximal."""
        return self.current - self.proximal

    def sum(self, values: Tensor) -> Tensor:
        """[sequences] sum of `values` [M] over each sequence."""
        return values.new_zeros(self.lengths.numel()).index_add_(0, self.sequence, values)

    def mean(self, values: Tensor) -> Tensor:
        """[sequences] mean of `values` [M] over each sequence; 0 for one without tokens."""
        return self.sum(values) / self.lengths.clamp(min=1).to(values.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """[M]: `values` [sequences] on each token."""
        return values.index_select(0, self.sequence)


MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of log-ratios clamped to +-20, so that a runaway token is finite (e^20 = 4.9e8) in value and gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def top_share(key: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """bool [N]: the max(1, floor(fraction * n)) tokens of largest `key` among the n that `mask` marks."""
    out = torch.zeros_like(mask)
    count = int(mask.sum())
    if count:
        best = torch.where(mask, key.double(), -torch.inf).topk(max(1, int(fraction * count))).indices
        out[best] = True
    return out & mask
