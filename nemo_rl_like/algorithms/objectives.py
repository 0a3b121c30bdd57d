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
    log_norm: Tensor | None = None
    """[M] logsumexp of the logits, if asked for."""


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
    def needs_log_norm(self) -> bool:
        """Whether `Outputs.log_norm` must be computed."""
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
class Auxiliary:
    """A further loss of an optimizer step, at temperature 1."""

    objective: Objective
    coef: float
    """Its weight."""
    name: str
    """Before its metrics' names."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of its metrics in the step's."""
        return tuple(f"{self.name}/{name}" for name in self.objective.metric_names)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Supervised: sum_t m_t (-log p_t + z_loss Z_t^2) / sum_t m_t over the trained tokens of the whole step; `dynamic`: -sg(p) log p.

    m is the token's weight in the batch's extras `weight`, 1 where there are none; Z is the log-normaliser (Chowdhery et al. 2022,
    PaLM, arXiv 2204.02311, section 5). Dynamic fine-tuning: Wu et al. 2025 (DFT, arXiv 2508.05629). `nll` is the mean of -log p
    with the same weights either way.
    """

    dynamic: bool = False
    z_loss: float = 0.0

    needs_entropy: bool = False
    needs_collision: bool = False
    looks_first: bool = False

    @property
    def needs_log_norm(self) -> bool:
        """The z-loss reads it."""
        return self.z_loss > 0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """`z_loss` is its share of the loss."""
        return ("loss", "nll", "z_loss") if self.z_loss else ("loss", "nll")

    def together(self, batch: TokenBatch) -> Tensor | None:
        """Any split will do."""
        return None

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Weights that sum to 1 over the step's trained tokens. Raises ValueError if none has any weight."""
        mask = batch.loss_mask
        if "weight" in batch.extras:
            weights = _shares(torch.where(mask, batch.extras["weight"], 0.0))
        else:
            weights = aggregation.token_weights("token_mean", mask, batch.row_of_token, batch.rows)
        return StepStats(weights=weights, tokens=float(mask.sum()), live_rows=batch.trained_per_row > 0)

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """The sum over these tokens."""
        logprobs = outputs.logprobs
        surprise = -weights * logprobs
        loss = (surprise * logprobs.detach().exp() if self.dynamic else surprise).sum()
        metrics = {"nll": surprise.detach().sum()}
        if self.z_loss:
            if outputs.log_norm is None:
                raise ValueError("the z-loss needs `Outputs.log_norm`, and it was not computed")
            drift = self.z_loss * (weights * outputs.log_norm.square()).sum()
            loss, metrics["z_loss"] = loss + drift, drift.detach()
        return LossSum(loss, {"loss": loss.detach(), **metrics})


def _shares(weights: Tensor) -> Tensor:
    """float32 [N] weights divided by their sum."""
    total = weights.double().sum()
    if not float(total) > 0:
        raise ValueError("no trained token of the step has a weight above 0")
    return (weights.double() / total).float()
