"""The trainer's log-probs beside the engine's, and beside its own before the step, on the tokens of a rollout batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.weights.gap import gap_quantiles

GAP_METRICS = ("gap/p50", "gap/p99", "gap/max")
"""Metric names of the quantiles of |engine - trainer| log-prob over the sampled tokens of the step, in nats."""


RATIO_METRICS = ("ratio/p01", "ratio/p50", "ratio/p99", "ratio/max")
"""Metric names of the quantiles of the importance ratio exp(current - proximal) over the trained tokens of an update."""
_RATIO_QUANTILES = (0.01, 0.5, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class GapLimit:
    """Largest allowed 99 % quantile of the gap, in nats, and the weight version the tokens must come from."""

    p99: float
    version: int


class GapExceeded(NrlError):
    """The engine's log-probs are not the trainer's: stale or wrong weights, another temperature or precision."""

    def __init__(self, measured: dict[str, float], limit: GapLimit) -> None:
        numbers = ", ".join(f"{name.removeprefix('gap/')} {value:.3g}" for name, value in measured.items())
        super().__init__(
            f"log-prob gap between engine and trainer: {numbers} nats; the limit on p99 is {limit.p99:g} "
            f"(engine.max_gap_p99) at weight version {limit.version}. The engine may hold other weights, a stale prefix cache, "
            "another temperature or a lower precision; bfloat16 needs a limit of about 0.3"
        )
        self.measured = measured
        self.limit = limit

    def __reduce__(self) -> tuple[type[GapExceeded], tuple[dict[str, float], GapLimit]]:
        return (GapExceeded, (self.measured, self.limit))


def rollout_gap(current: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """float32 [3], the values of `GAP_METRICS`, on `current`'s device; zeros when nothing was sampled.

    `current` and `behavior` float32 [N]: trainer's and engine's log-probs at the sampling temperature; `mask` bool [N]:
    the sampled tokens to compare. `mask` and `behavior` come from the batch, on the CPU, so nothing waits for the device.
    """
    where = mask.nonzero()[:, 0]
    return gap_quantiles(behavior[where].to(current.device), current[where.to(current.device)])


def ratio_quantiles(current: Tensor, proximal: Tensor, mask: Tensor) -> Tensor:
    """float32 [4], the values of `RATIO_METRICS`, on `current`'s device; zeros when nothing is trained.

    `current` and `proximal` float32 [N]; `mask` bool [N]: the trained tokens. `mask` and `proximal` come from the batch, on the CPU. The
    quantile q is the value at index floor(q * count) of the sorted ratios.
    """
    where = mask.nonzero()[:, 0]
    count = where.numel()
    if count == 0:
        return current.new_zeros(len(_RATIO_QUANTILES))
    ratios = (current[where.to(current.device)] - proximal[where].to(current.device)).exp().sort().values
    picks = [min(count - 1, int(q * count)) for q in _RATIO_QUANTILES]
    return ratios[torch.tensor(picks, device=ratios.device)]
