"""Quantiles of |engine - trainer| log-prob: how far two sides that should hold the same weights are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

QUANTILES = (0.5, 0.99, 1.0)
"""p50, p99 and the maximum."""


def gap_quantiles(engine: Tensor, trainer: Tensor) -> Tensor:
    """[3] `QUANTILES` of |engine - trainer|, in nats, in the type and on the device of its arguments; zeros for no tokens.

    `engine`, `trainer`: floating [N], log-probs of the same tokens. A NaN on either side counts as an infinite gap. The
    quantile q is the value at index floor(q * N) of the sorted gaps. Nothing waits for the device.
    """
    count = engine.numel()
    if count == 0:
        return engine.new_zeros(len(QUANTILES))
    gaps = (engine - trainer).abs().nan_to_num(nan=math.inf, posinf=math.inf).sort().values
    picks = [min(count - 1, int(q * count)) for q in QUANTILES]
    return gaps[torch.tensor(picks, device=gaps.device)]
