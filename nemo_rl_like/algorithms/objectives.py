"""Objectives: what a model minimises, and the supervised one.

An objective declares what it `needs`, has `prepare(batch)` run once over the whole optimizer step, and a
`loss(outputs, tokens, stats)` that is a plain sum: the sum over any split of the step is the step's loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_like.algorithms import aggregation
from nemo_rl_like.tokens.batch import TokenBatch


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a model computed for M scored tokens."""

    logprobs: Tensor
    """[M] current log-probs, in nats; of a model with a score head, the scores."""
    entropy: Tensor | None = None
    """[M] in nats, if asked for."""
    collision: Tensor | None = None
    """[M] log sum_v p(v)^2, without gradient, if asked for."""
    candidates: Tensor | None = None
    """[M, K] current log-probs of `StepStats.candidates`, if there are any."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Made once per optimizer step from all its rows: per-token weights [N] and the counts behind metrics."""

    weights: Tensor
    """float32 [N] aggregation weight of each token."""
    tokens: float
    """Trained tokens of the live rows of the whole step: the divisor of token-mean metrics."""
    live_rows: Tensor
    """bool [B] rows whose loss can have a gradient; the others need no forward pass."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """[N] further per-token inputs of the loss, by name."""
    lengths: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 [sequences] trained tokens of each sequence, for losses that look at sequences."""
    candidates: Tensor | None = None
    """int [N, K] token ids whose log-probs the loss reads at each place, beside that of the token that stands there."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """A micro-batch's share of the loss (a scalar with gradient) and of the metrics (scalars without)."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """A loss over a step's tokens."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `Outputs.entropy` must be computed."""
        ...

    @property
    def needs_collision(self) -> bool:
        """Whether `Outputs.collision` must be computed."""
        ...

    @property
    def looks_first(self) -> bool:
        """Whether `prepare` reads the step's `current` log-probs and `entropy`, from a forward pass of their own."""
        ...

    def together(self, batch: TokenBatch) -> Tensor | None:
        """int64 [B]: rows of equal numbers must be in the same pass; None: any split will do."""
        ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics, in a fixed order, so that ranks without tokens can reduce with the others."""
        ...

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Counts and weights over the whole step, without gradient."""
        ...

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """Sum over M tokens; `values` and `weights` are `stats`' gathered at these tokens, [M]."""
        ...


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Supervised: mean of -log p over the trained tokens of the whole step; `dynamic`: of -sg(p) log p.

    Dynamic fine-tuning: Wu et al. 2025 (DFT, arXiv 2508.05629). `nll` is the mean of -log p either way.
    """

    dynamic: bool = False

    needs_entropy: bool = False
    needs_collision: bool = False
    looks_first: bool = False
    metric_names: tuple[str, ...] = ("loss", "nll")

    def together(self, batch: TokenBatch) -> Tensor | None:
        """Any split will do."""
        return None

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Token-mean weights over the step."""
        weights = aggregation.token_weights("token_mean", batch.loss_mask, batch.row_of_token, batch.rows)
        return StepStats(weights=weights, tokens=float(batch.loss_mask.sum()), live_rows=batch.trained_per_row > 0)

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """-sum w log p, or -sum w sg(p) log p."""
        logprobs = outputs.logprobs
        surprise = -weights * logprobs
        loss = (surprise * logprobs.detach().exp() if self.dynamic else surprise).sum()
        return LossSum(loss, {"loss": loss.detach(), "nll": surprise.detach().sum()})
