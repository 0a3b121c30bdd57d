"""Objectives: what a policy minimises, composed of the pure functions beside this file.

An objective declares what it `needs`, has `prepare(batch)` run once over the whole optimizer step, and a
`loss(outputs, tokens, stats)` that is a plain sum: the sum over any split of the step is the step's loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_like.algorithms import aggregation, kl, policy_losses
from nemo_rl_like.algorithms.advantages import estimate
from nemo_rl_like.tokens.batch import TokenBatch


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the model computed for M scored tokens: current log-probs [M] and, if asked for, entropy [M], in nats."""

    logprobs: Tensor
    entropy: Tensor | None = None


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
    """float32 [N] further per-token inputs of the loss, by name."""


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
    """Supervised: mean of -log p over the trained tokens of the whole step."""

    needs_entropy: bool = False
    metric_names: tuple[str, ...] = ("loss",)

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Token-mean weights over the step."""
        weights = aggregation.token_weights("token_mean", batch.loss_mask, batch.row_of_token, batch.rows)
        return StepStats(weights=weights, tokens=float(batch.loss_mask.sum()), live_rows=batch.trained_per_row > 0)

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """-sum w log p."""
        loss = -(weights * outputs.logprobs).sum()
        return LossSum(loss, {"loss": loss.detach()})


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """Advantage-weighted policy loss with optional KL to a reference and entropy bonus.

    Reads the batch's `advantages`, and `proximal` and `reference` log-probs where they are used. Without `proximal`
    (a single on-policy update) current.detach() takes its place: the ratio is exactly 1.
    """

    policy_loss: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: str = "token_mean"
    aggregation_length: int | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    on_policy: bool = False

    @property
    def needs_entropy(self) -> bool:
        """Entropy is a metric of every RL step, so always."""
        return True

    @property
    def metric_names(self) -> tuple[str, ...]:
        """TRL's names where it has one."""
        names = ("loss", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "ratio/mean", "approx_kl")
        return (*names, "kl", "kl/k1") if self.kl_coef else names

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Weights over the whole step. Raises ValueError if a needed per-token value is missing."""
        needed = ["advantages"]
        if not self.on_policy:
            needed.append("proximal")
        if self.kl_coef:
            needed.append("reference")
        missing = [name for name in needed if name not in batch.extras]
        if missing:
            raise ValueError(f"the batch lacks {', '.join(missing)}; a missing one is never taken as 0")
        weights = aggregation.token_weights(
            self.aggregation, batch.loss_mask, batch.row_of_token, batch.rows, self.aggregation_length
        )
        values = {name: torch.where(batch.loss_mask, batch.extras[name], 0.0) for name in needed}
        live = self._live_rows(batch, values["advantages"])
        tokens = float((batch.loss_mask & live[batch.row_of_token]).sum())
        return StepStats(weights=weights, tokens=tokens, live_rows=live, values=values)

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """sum w (policy loss + kl_coef KL - entropy_coef H)."""
        current = outputs.logprobs
        proximal = current.detach() if self.on_policy else values["proximal"]
        policy = self._policy(current, proximal, values["advantages"])
        total = (weights * policy.loss).sum()
        per_token = 1.0 / max(stats.tokens, 1.0)
        metrics = {
            "clip_ratio/low_mean": policy.clipped_low.sum() * per_token,
            "clip_ratio/high_mean": policy.clipped_high.sum() * per_token,
            "ratio/mean": policy.ratio.sum() * per_token,
            "approx_kl": kl.k3((current - proximal).detach()).sum() * per_token,
        }
        if self.kl_coef:
            x = current - values["reference"]
            divergence = kl.LOSS_ESTIMATORS[self.kl_estimator](x)
            total = total + self.kl_coef * (weights * divergence).sum()
            metrics["kl"] = kl.k3(x.detach()).sum() * per_token
            metrics["kl/k1"] = x.detach().sum() * per_token
        if outputs.entropy is not None:
            metrics["entropy"] = outputs.entropy.detach().sum() * per_token
            if self.entropy_coef:
                total = total - self.entropy_coef * (weights * outputs.entropy).sum()
        metrics["loss"] = total.detach()
        return LossSum(total, metrics)

    def _live_rows(self, batch: TokenBatch, advantages: Tensor) -> Tensor:
        """Rows with trained tokens; without KL and entropy terms, only those with an advantage other than 0.

        A row of zero advantage then adds exactly 0 to loss and gradient; it still counts in every denominator.
        """
        trained = batch.trained_per_row
        if self.kl_coef or self.entropy_coef:
            return trained > 0
        moved = torch.zeros(batch.rows, dtype=torch.int64).index_add_(0, batch.row_of_token, (advantages != 0).long())
        return moved > 0 if bool((moved > 0).any()) else trained > 0

    def _policy(self, current: Tensor, proximal: Tensor, advantage: Tensor) -> policy_losses.PolicyLoss:
        if self.policy_loss == "reinforce":
            return policy_losses.reinforce(current, proximal, advantage)
        return policy_losses.clip(
            current, proximal, advantage, low=self.clip_low, high=self.clip_high, dual=self.dual_clip
        )


def with_advantages(
    batch: TokenBatch, estimator: str, reward: str = "reward", permutation: Tensor | None = None
) -> TokenBatch:
    """The batch with `advantages` [N]: one per episode from its reward, on each of its trained tokens.

    Rows of one episode (its segments) count once in their group. `permutation` int64 [E] reassigns the rewards of
    the episodes before the advantages are taken (control experiments).
    """
    episodes, of_row = torch.unique(batch.episode_id, return_inverse=True)
    first = torch.full((episodes.numel(),), batch.rows, dtype=torch.int64)
    first.scatter_reduce_(0, of_row, torch.arange(batch.rows), "amin")
    rewards = batch.rewards[reward][first]
    if permutation is not None:
        rewards = rewards[permutation]
    valid = batch.valid[first] & ~rewards.isnan()
    advantage = estimate(estimator, rewards, batch.group_id[first], valid)
    per_token = advantage[of_row][batch.row_of_token]
    return batch.with_extras(advantages=torch.where(batch.loss_mask, per_token, 0.0))
