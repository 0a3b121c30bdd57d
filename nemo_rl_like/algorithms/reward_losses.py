"""What reward models minimise, as functions of scores and as an objective over a step's scored places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from nemo_rl_like.algorithms.objectives import LossSum, Outputs, StepStats
from nemo_rl_like.spec.reward_model import PairwiseReward, ProcessReward, RegressionReward, RewardLossSpec
from nemo_rl_like.tokens.batch import TokenBatch


def pairwise(chosen: Tensor, rejected: Tensor, margin: Tensor, center: float) -> Tensor:
    """-log sigmoid(s_c - s_r - margin) + center (s_c + s_r)^2, [P].

    Bradley and Terry 1952; Ouyang et al. 2022 (arXiv 2203.02155), eq. 1; margin: Touvron et al. 2023 (arXiv 2307.09288), eq. 2;
    centring: Eisenstein et al. 2023 (arXiv 2312.09244), eq. 2.
    """
    return -logsigmoid(chosen - rejected - margin) + center * (chosen + rejected).square()


def regression(scores: Tensor, targets: Tensor) -> Tensor:
    """(s - y)^2, [M]. Wang et al. 2024 (HelpSteer2, arXiv 2406.08673)."""
    return (scores - targets).square()


def process(scores: Tensor, labels: Tensor) -> Tensor:
    """-y log sigmoid(s) - (1 - y) log sigmoid(-s), [M]; y in [0, 1].

    Lightman et al. 2023 (arXiv 2305.20050); soft labels: Wang et al. 2024 (Math-Shepherd, arXiv 2312.08935), eq. 2.
    """
    return binary_cross_entropy_with_logits(scores, labels, reduction="none")


def objective_of(options: RewardLossSpec) -> PairwiseScores | TargetScores:
    """The objective that a stage's `loss` block describes."""
    if isinstance(options, PairwiseReward):
        return PairwiseScores(options)
    return TargetScores(options)


@dataclass(frozen=True, slots=True)
class PairwiseScores:
    """Mean of `pairwise` over the step's pairs.

    The rows of one `group_id` are a pair with one scored place each; reads the columns `chosen` (1 or 0) and, with a weight, `margin`.
    """

    options: PairwiseReward
    needs_entropy: bool = False
    needs_collision: bool = False
    needs_log_norm: bool = False
    looks_first: bool = False
    metric_names: tuple[str, ...] = ("loss", "accuracy", "margin", "score/chosen", "score/rejected")

    def together(self, batch: TokenBatch) -> Tensor | None:
        """The two sides of a pair."""
        return batch.group_id

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Number the sides: 2 p and 2 p + 1 are the chosen and the rejected one of pair p. Raises ValueError for no pair."""
        pairs, pair_of_row = torch.unique(batch.group_id, return_inverse=True)
        side = 2 * pair_of_row + (batch.column("chosen") == 0).long()
        places = torch.zeros(2 * pairs.numel()).index_add_(0, side, batch.trained_per_row.float())
        wrong = (places != 1).nonzero()[:, 0]
        if wrong.numel():
            group = int(pairs[int(wrong[0]) // 2])
            raise ValueError(f"group {group} is no pair of a chosen and a rejected row with one scored place each")
        values = {"side": side[batch.row_of_token]}
        if self.options.margin_weight:
            values["margin"] = self.options.margin_weight * batch.column("margin")[batch.row_of_token]
        return StepStats(
            weights=batch.loss_mask.float() / pairs.numel(),
            tokens=float(batch.loss_mask.sum()),
            live_rows=batch.trained_per_row > 0,
            values=values,
            lengths=places,
        )

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """The sum over the pairs whose places are here; `weights` is 1 / (pairs of the step) at each."""
        scores, side = outputs.logprobs, values["side"]
        zeros = torch.zeros(stats.lengths.numel(), dtype=scores.dtype, device=scores.device)
        chosen, rejected = zeros.index_add(0, side, scores).view(-1, 2).unbind(1)
        share = zeros.index_add(0, side, weights.to(scores))[0::2]
        margin = zeros.index_add(0, side, values["margin"].to(scores))[0::2] if "margin" in values else zeros[0::2]
        total = (share * pairwise(chosen, rejected, margin, self.options.center)).sum()
        here, there = chosen.detach(), rejected.detach()
        metrics = {
            "loss": total.detach(),
            "accuracy": (share * (here > there)).sum(),
            "margin": (share * (here - there)).sum(),
            "score/chosen": (share * here).sum(),
            "score/rejected": (share * there).sum(),
        }
        return LossSum(total, metrics)


@dataclass(frozen=True, slots=True)
class TargetScores:
    """Mean of `regression` or `process` over the step's scored places; reads the per-token `target` at each."""

    options: RegressionReward | ProcessReward
    needs_entropy: bool = False
    needs_collision: bool = False
    needs_log_norm: bool = False
    looks_first: bool = False

    @property
    def metric_names(self) -> tuple[str, ...]:
        """`accuracy`: places on the right side of a label of .5; `explained_variance` of the targets over the step."""
        return ("loss", "accuracy" if self.options.kind == "process" else "explained_variance", "score/mean")

    def together(self, batch: TokenBatch) -> Tensor | None:
        """Any split will do."""
        return None

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Equal weights over the step's places. Raises ValueError without targets."""
        if "target" not in batch.extras:
            raise ValueError("the batch lacks target; a missing one is never taken as 0")
        mask = batch.loss_mask
        count = max(float(mask.sum()), 1.0)
        targets = torch.where(mask, batch.extras["target"], 0.0)
        mean = targets.sum() / count
        variance = (torch.where(mask, targets - mean, 0.0).square().sum() / count).expand(mask.numel())
        return StepStats(
            weights=mask.float() / count,
            tokens=float(mask.sum()),
            live_rows=batch.trained_per_row > 0,
            values={"target": targets, "variance": variance},
        )

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """The sum over M scored places."""
        scores, targets = outputs.logprobs, values["target"]
        shown = scores.detach()
        if self.options.kind == "process":
            total = (weights * process(scores, targets)).sum()
            told = {"accuracy": (weights * ((shown > 0) == (targets > 0.5))).sum()}
        else:
            total = (weights * regression(scores, targets)).sum()
            # A sum of 1 - (s - y)^2 / variance over the step; 0 where all targets are equal, as nothing is there to explain.
            unexplained = (shown - targets).square() / values["variance"].clamp(min=1e-30)
            told = {"explained_variance": (weights * torch.where(values["variance"] > 0, 1 - unexplained, 0.0)).sum()}
        return LossSum(total, {"loss": total.detach(), **told, "score/mean": (weights * shown).sum()})
