"""`ValueLoss`: what a critic is trained to, the returns of its own estimates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.algorithms.aggregation import token_weights
from nemo_rl_like.algorithms.objectives import LossSum, Outputs, StepStats
from nemo_rl_like.tokens.batch import TokenBatch


def clipped_square(value: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """.5 max((V - G)^2, (V_old + clamp(V - V_old, -c, c) - G)^2), [M]; without `clip` .5 (V - G)^2.

    Schulman et al.'s PPO code; Ziegler et al. 2019 (arXiv 1909.08593).
    """
    square = (value - returns).square()
    if clip is not None:
        square = torch.maximum(square, (old + (value - old).clamp(-clip, clip) - returns).square())
    return 0.5 * square


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Token mean of `clipped_square`. Reads the batch's `returns` and `values`."""

    clip: float | None = 0.2
    """How far a value may move from the one that the advantages were made of; None: anywhere."""
    needs_entropy: bool = False
    needs_collision: bool = False
    needs_log_norm: bool = False
    looks_first: bool = False
    metric_names: tuple[str, ...] = ("loss", "clip_ratio", "mean")

    def together(self, batch: TokenBatch) -> Tensor | None:
        """Any split will do."""
        return None

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Token-mean weights over the step. Raises ValueError if returns or values are missing."""
        missing = [name for name in ("returns", "values") if name not in batch.extras]
        if missing:
            raise ValueError(f"the batch lacks {', '.join(missing)}; a missing one is never taken as 0")
        mask = batch.loss_mask
        weights = token_weights("token_mean", mask, batch.row_of_token, batch.rows)
        values = {name: torch.where(mask, batch.extras[name], 0.0) for name in ("returns", "values")}
        return StepStats(weights, float(mask.sum()), batch.trained_per_row > 0, values)

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """sum w .5 (V - G)^2, with clipping."""
        value, old, share = outputs.logprobs, values["values"], 1.0 / max(stats.tokens, 1.0)
        total = (weights * clipped_square(value, old, values["returns"], self.clip)).sum()
        moved = (value - old).detach().abs()
        clipped = (moved > self.clip).sum() if self.clip is not None else torch.zeros_like(total)
        metrics = {"loss": total.detach(), "clip_ratio": clipped * share, "mean": value.detach().sum() * share}
        return LossSum(total, metrics)


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """1 - Var(G - V) / Var(G) over trained tokens [T]; 0 where the returns do not vary."""
    if not returns.numel():
        return 0.0
    spread = returns.double().var(correction=0)
    if float(spread) == 0:
        return 0.0
    return float(1 - (returns.double() - values.double()).var(correction=0) / spread)
