"""`PolicyGradient`: policy loss x correction x KL x aggregation, as an algorithm block composes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_like.algorithms import corrections, kl, policy_losses
from nemo_rl_like.algorithms.aggregation import token_weights
from nemo_rl_like.algorithms.objectives import LossSum, Outputs, StepStats
from nemo_rl_like.algorithms.sequences import Scored, bounded_exp, top_share
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.policy_losses import ClipCovLoss, KlCovLoss, SequenceMeanTokenSumNorm
from nemo_rl_like.tokens.batch import TokenBatch

ROUNDING = 1e-8
"""Covariances up to this are 0 but for rounding."""


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """sum over tokens of weight * (correction * (policy loss + coef KL) - coef entropy).

    Reads the batch's `advantages`, and `proximal`, `reference`, `behavior`, `draws`, `current` and `entropy` where they are used.
    Without `proximal` (a single on-policy update) current.detach() takes its place: the ratio is exactly 1.
    """

    algorithm: AlgorithmSpec = field(default_factory=AlgorithmSpec)
    max_new_tokens: int = 256
    """L_max where the aggregation names no length, in tokens."""
    on_policy: bool = False
    """One update a step: no proximal log-probs."""

    @property
    def needs_entropy(self) -> bool:
        """Entropy is a metric of every RL step, so always."""
        return True

    @property
    def needs_collision(self) -> bool:
        """No choice reads it."""
        return False

    @property
    def needs_log_norm(self) -> bool:
        """No choice reads it."""
        return False

    @property
    def looks_first(self) -> bool:
        """Tokens that are chosen by covariance or entropy are chosen over the whole step."""
        return self.algorithm.policy_loss.kind in ("kl_cov", "clip_cov") or self.algorithm.top_entropy is not None

    def together(self, batch: TokenBatch) -> Tensor | None:
        """A ratio, weight or mask of a sequence needs all rows of the episode in the same pass."""
        kinds = {c.kind for c in self.algorithm.correction}
        by_sequence = self.algorithm.policy_loss.kind in policy_losses.BY_SEQUENCE or kinds & corrections.BY_SEQUENCE
        return batch.episode_id if by_sequence else None

    @property
    def in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.algorithm.kl.coef > 0 and self.algorithm.kl.place == "loss"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """TRL's names where it has one."""
        names: tuple[str, ...] = (
            "loss",
            "entropy",
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "ratio/mean",
            "approx_kl",
        )
        if self.algorithm.correction:
            names += ("correction/mean",)
        return (*names, "kl", "kl/k1") if self.in_loss else names

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Weights and choices over the whole step. Raises ValueError if a needed per-token value is missing."""
        mask = self._trained(batch)
        values = {name: torch.where(mask, batch.extras[name], 0.0) for name in self._needed(batch)}
        values["behavior"] = torch.where(mask, batch.behavior, 0.0)
        episodes, sequence = torch.unique(batch.episode_id, return_inverse=True)
        values["sequence"] = sequence[batch.row_of_token]
        values |= self._choices(batch, mask, values)
        aggregation = self.algorithm.aggregation
        length = aggregation.length if isinstance(aggregation, SequenceMeanTokenSumNorm) else None
        count = episodes.numel()
        weights = token_weights(aggregation.kind, mask, values["sequence"], count, length or self.max_new_tokens)
        live = self._live_rows(batch, mask, values["advantages"], sequence)
        return StepStats(
            weights=weights,
            tokens=float((mask & live[batch.row_of_token]).sum()),
            live_rows=live,
            values=values,
            lengths=torch.zeros(count).index_add_(0, values["sequence"], mask.float()),
        )

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """The sum over M tokens, and their share of the metrics."""
        algorithm = self.algorithm
        tokens = self._scored(outputs.logprobs, values, stats.lengths)
        policy = policy_losses.policy_loss(algorithm.policy_loss, tokens)
        loss = policy.loss
        if algorithm.top_entropy is not None:
            loss = torch.where(values["kept"] > 0, loss, 0.0)
        factor = corrections.correction(algorithm.correction, tokens)
        total = (weights * factor * loss).sum()
        share = 1.0 / max(stats.tokens, 1.0)
        metrics = {
            "clip_ratio/low_mean": policy.clipped_low.sum() * share,
            "clip_ratio/high_mean": policy.clipped_high.sum() * share,
            "ratio/mean": policy.ratio.sum() * share,
            "approx_kl": kl.k3(tokens.log_ratio.detach()).sum() * share,
        }
        if algorithm.correction:
            metrics["correction/mean"] = factor.sum() * share
        if self.in_loss:
            x = (tokens.current - values["reference"]).detach()
            total = total + algorithm.kl.coef * (weights * self._divergence(tokens, factor)).sum()
            metrics["kl"] = kl.k3(x).sum() * share
            metrics["kl/k1"] = x.sum() * share
        if algorithm.positive_nll_coef:
            total = total - algorithm.positive_nll_coef * (values["positive"] * tokens.current).sum()
        if outputs.entropy is not None:
            metrics["entropy"] = outputs.entropy.detach().sum() * share
            if algorithm.entropy_coef:
                total = total - algorithm.entropy_coef * (weights * outputs.entropy).sum()
        metrics["loss"] = total.detach()
        return LossSum(total, metrics)

    def _scored(self, current: Tensor, values: dict[str, Tensor], lengths: Tensor) -> Scored:
        return Scored(
            current=current,
            proximal=current.detach() if self.on_policy else values["proximal"],
            advantage=values["advantages"],
            sequence=values["sequence"],
            lengths=lengths.to(current.device),
            values=values,
        )

    def _divergence(self, tokens: Scored, factor: Tensor) -> Tensor:
        """[M] the KL term; an unbiased one has a ratio of its own and takes no further weight."""
        spec, reference = self.algorithm.kl, tokens.values["reference"]
        if spec.unbiased:
            return kl.loss(spec.estimator, tokens.current, reference, tokens.values["behavior"])
        return factor * kl.loss(spec.estimator, tokens.current, reference)

    def _trained(self, batch: TokenBatch) -> Tensor:
        """bool [N] tokens that are in numerator and denominators."""
        if not self.algorithm.mask_truncated:
            return batch.loss_mask
        return batch.loss_mask & ~batch.column("truncated").bool()[batch.row_of_token]

    def _needed(self, batch: TokenBatch) -> tuple[str, ...]:
        needed = ["advantages"]
        if not self.on_policy:
            needed.append("proximal")
        if self.in_loss:
            needed.append("reference")
        if self.looks_first:
            needed += ["current", "entropy"]
        if self.algorithm.policy_loss.kind == "clip_cov":
            needed.append("draws")
        missing = [name for name in needed if name not in batch.extras]
        if missing:
            raise ValueError(f"the batch lacks {', '.join(missing)}; a missing one is never taken as 0")
        return tuple(needed)

    def _choices(self, batch: TokenBatch, mask: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Per-token values that depend on the whole step."""
        out: dict[str, Tensor] = {}
        algorithm = self.algorithm
        if algorithm.policy_loss.kind == "gpg":
            out["group_scale"] = torch.full(mask.shape, _group_scale(batch, mask, values["advantages"]))
        if isinstance(algorithm.policy_loss, KlCovLoss):
            covariance = _covariance(values, mask)
            highest = top_share(covariance, mask, algorithm.policy_loss.fraction)
            out["selected"] = (highest & (covariance > ROUNDING)).float()
        if isinstance(algorithm.policy_loss, ClipCovLoss):
            out["selected"] = self._clip_cov(algorithm.policy_loss, values, mask).float()
        if algorithm.top_entropy is not None:
            out["kept"] = top_share(values["entropy"], mask, algorithm.top_entropy).float()
        if algorithm.positive_nll_coef:
            positive = mask & (batch.rewards["reward"] > 0)[batch.row_of_token]
            out["positive"] = positive.float() / max(int(positive.sum()), 1)
        return out

    def _clip_cov(self, options: ClipCovLoss, values: dict[str, Tensor], mask: Tensor) -> Tensor:
        """bool [N]: of the eligible tokens, as many as the fraction says, those with the smallest draws."""
        covariance = _covariance(values, mask)
        eligible = mask & (covariance > options.cov_low) & (covariance < options.cov_high)
        if not self.on_policy:
            ratio = bounded_exp(values["current"] - values["proximal"])
            below, above = policy_losses.outside(ratio, values["advantages"], options.low, options.high)
            eligible &= ~(below | above)
        count = max(1, int(options.fraction * int(mask.sum())))
        order = torch.where(eligible, values["draws"], torch.inf).argsort(stable=True)[:count]
        chosen = torch.zeros_like(mask)
        chosen[order] = True
        return chosen & eligible

    def _live_rows(self, batch: TokenBatch, mask: Tensor, advantages: Tensor, sequence: Tensor) -> Tensor:
        """Rows with trained tokens; where the loss has no other term, only those of episodes with an advantage other than 0.

        A row of zero advantage then adds exactly 0 to loss and gradient; it still counts in every denominator.
        """
        algorithm = self.algorithm
        trained = torch.zeros(batch.rows, dtype=torch.int64).index_add_(0, batch.row_of_token, mask.long()) > 0
        more_terms = self.in_loss or algorithm.entropy_coef or algorithm.positive_nll_coef
        if more_terms or algorithm.policy_loss.kind not in policy_losses.NO_ADVANTAGE_NO_GRADIENT:
            return trained
        moved = torch.zeros(int(sequence.max()) + 1, dtype=torch.int64)
        moved.index_add_(0, sequence[batch.row_of_token], ((advantages != 0) & mask).long())
        live = trained & (moved > 0)[sequence]
        return live if bool(live.any()) else trained


def _covariance(values: dict[str, Tensor], mask: Tensor) -> Tensor:
    """[N] (current - mean)(A - mean) over the trained tokens of the step, float64; 0 elsewhere."""
    count = mask.sum().clamp(min=1)
    deviations = [
        torch.where(mask, x - x.sum() / count, 0.0) for x in (values[n].double() for n in ("current", "advantages"))
    ]
    return deviations[0] * deviations[1]


def _group_scale(batch: TokenBatch, mask: Tensor, advantages: Tensor) -> float:
    """Groups with trained tokens / groups with an advantage other than 0 on one; 0 if there are none."""
    group = batch.group_id[batch.row_of_token]
    moved = torch.unique(group[mask & (advantages != 0)]).numel()
    return torch.unique(group[mask]).numel() / moved if moved else 0.0
