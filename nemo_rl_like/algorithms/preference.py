"""`Preference`: losses of pairs, and `Kto`: a loss of single completions. One sequence is one completion: all rows of an episode.

Both read the batch's column `chosen` (1 or 0) and, where a loss has a reference, the per-token `reference` log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.algorithms.objectives import LossSum, Outputs, StepStats
from nemo_rl_like.algorithms.preference_losses import Completions, Pairs, kto, preference_loss, rewards
from nemo_rl_like.spec import preference as spec
from nemo_rl_like.tokens.batch import TokenBatch

SIDES = ("chosen", "rejected")


def objective_of(options: spec.PreferenceSpec, mean_log_ratio: float = 0.0) -> Preference | Kto:
    """The objective that the stage's losses describe. `mean_log_ratio`: of the completions of earlier steps, for bco."""
    (first, *_) = options.losses
    if isinstance(first, spec.KtoLoss):
        return Kto(first)
    return Preference(options, mean_log_ratio)


@dataclass(frozen=True, slots=True)
class Preference:
    """Mean over the step's pairs of sum_k weight_k loss_k + rpo_alpha * (-pi_c / T_c), times the pair's WPO weight.

    The rows of one `group_id` are a pair: a chosen and a rejected completion. Reads the column `margin` where a loss does.
    RPO: Pang et al. 2024 (arXiv 2404.19733). LD-DPO: Liu et al. 2024 (arXiv 2409.06411). WPO: Zhou et al. 2024 (arXiv
    2406.11827), eq. 2.
    """

    options: spec.PreferenceSpec
    mean_log_ratio: float = 0.0
    """Mean log-ratio of the completions of earlier steps; bco's delta is beta times it."""
    exploration: float = 0.0
    """Weight of the summed log-prob of the completions of the column `explored`, which is minimised: alpha of Xie et al. 2024
    (XPO, arXiv 2405.21046), eq. 4."""
    needs_entropy: bool = False
    needs_log_norm: bool = False
    looks_first: bool = False

    @property
    def needs_collision(self) -> bool:
        """WPO weighs by the distribution's own collision probability."""
        return self.options.wpo

    @property
    def metric_names(self) -> tuple[str, ...]:
        """TRL's names."""
        names = [f"{what}/{side}" for what in ("rewards", "logps") for side in SIDES]
        return ("loss", *names, "rewards/margins", "rewards/accuracies")

    def together(self, batch: TokenBatch) -> Tensor | None:
        """The two sides of a pair."""
        return batch.group_id

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Number the sequences: 2 p and 2 p + 1 are the chosen and the rejected completion of pair p.

        Raises ValueError for a group that is no pair, and where the batch lacks what a loss reads.
        """
        pairs, pair_of_row = torch.unique(batch.group_id, return_inverse=True)
        sequence_of_row = 2 * pair_of_row + (batch.column("chosen") == 0).long()
        count = pairs.numel()
        _check_pairs(batch, sequence_of_row, pairs)
        mask, sequence = batch.loss_mask, sequence_of_row[batch.row_of_token]
        lengths = torch.zeros(2 * count).index_add_(0, sequence, mask.float())
        values = {"sequence": sequence}
        if self.options.needs_reference:
            values["reference"] = _reference(batch)
        if self.options.ld_alpha is not None:
            values["tail"] = _tail_weights(mask, sequence, lengths, self.options.ld_alpha)
        if self.options.needs_margin:
            values["margin"] = batch.column("margin")[batch.row_of_token]
        if self.exploration:
            values["explored"] = batch.column("explored")[batch.row_of_token]
        return StepStats(
            weights=mask.float() / count,
            tokens=float(mask.sum()),
            live_rows=batch.trained_per_row > 0,
            values=values,
            lengths=lengths,
        )

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """The sum over the pairs whose tokens are here; `weights` is 1 / (pairs of the step) at each token."""
        tokens = stats.lengths.to(outputs.logprobs)
        sides = _by_side(_completions(outputs.logprobs, values, tokens))
        share = _of_sequence(weights, values["sequence"], tokens)[0::2]
        pairs = Pairs(*sides, self.options.f_divergence, self.mean_log_ratio, self._margin(values, tokens))
        loss = torch.zeros_like(share)
        for options in self.options.losses:
            loss = loss + options.weight * preference_loss(options, pairs)
        if self.options.rpo_alpha:
            loss = loss - self.options.rpo_alpha * pairs.chosen.mean
        if self.options.wpo:
            loss = self._likelihood(outputs, values["sequence"], tokens) * loss
        if self.exploration:
            explored = _sums(outputs.logprobs * values["explored"], values["sequence"], tokens)
            loss = loss + self.exploration * (explored[0::2] + explored[1::2])
        total = _weighted(share, loss)
        return LossSum(total, {"loss": total.detach(), **self._told(pairs, share)})

    def _margin(self, values: dict[str, Tensor], tokens: Tensor) -> Tensor | None:
        return _of_sequence(values["margin"], values["sequence"], tokens)[0::2] if self.options.needs_margin else None

    def _likelihood(self, outputs: Outputs, sequence: Tensor, tokens: Tensor) -> Tensor:
        """[P] min(1, w_c w_r), w = exp(mean_t (log p_t - log sum_v p(v)^2)), without gradient."""
        if outputs.collision is None:
            raise ValueError("wpo needs `Outputs.collision`, and it was not computed")
        aligned = _sums(outputs.logprobs.detach() - outputs.collision, sequence, tokens) / tokens
        return (aligned[0::2] + aligned[1::2]).clamp(max=0).exp()

    @torch.no_grad()
    def _told(self, pairs: Pairs, share: Tensor) -> dict[str, Tensor]:
        """Metrics but for the loss."""
        chosen, rejected = (rewards(self.options.measured, side) for side in (pairs.chosen, pairs.rejected))
        return {
            "rewards/chosen": _weighted(share, chosen),
            "rewards/rejected": _weighted(share, rejected),
            "rewards/margins": _weighted(share, chosen - rejected),
            "rewards/accuracies": _weighted(share, (chosen > rejected).to(share)),
            "logps/chosen": _weighted(share, pairs.chosen.logp),
            "logps/rejected": _weighted(share, pairs.rejected.logp),
        }


@dataclass(frozen=True, slots=True)
class Kto:
    """Mean over the step's completions of kto's loss; z comes from the extra rows of the column `mismatched`.

    Those rows hold another sample's completion behind this one's prompt. Only their log-probs before the update are read, from a
    forward pass without gradient, so they take no part in the pass that trains.
    """

    options: spec.KtoLoss
    needs_entropy: bool = False
    needs_collision: bool = False
    needs_log_norm: bool = False
    looks_first: bool = True

    @property
    def metric_names(self) -> tuple[str, ...]:
        """TRL's names; `kl` is z."""
        return ("loss", "kl", *(f"{what}/{side}" for what in ("rewards", "logps") for side in SIDES), "rewards/margins")

    def together(self, batch: TokenBatch) -> Tensor | None:
        """All rows of a completion."""
        return batch.episode_id

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Number the completions, and compute z over the whole step.

        Raises ValueError for fewer than two completions or no mismatched one, and where the batch lacks what the loss reads.
        """
        mismatched = batch.column("mismatched") > 0
        if not bool(mismatched.any()):
            raise ValueError("kto needs mismatched completions, and the batch has none")
        live = ~mismatched & (batch.trained_per_row > 0)
        episodes, first, sequence_of_row = _numbered(batch.episode_id, live)
        if episodes < 2:
            raise ValueError(f"kto needs at least two completions in a step, and the batch has {episodes}")
        mask = batch.loss_mask & live[batch.row_of_token]
        sequence = sequence_of_row[batch.row_of_token]
        desirable = batch.column("chosen")[first] > 0
        sides = torch.stack([desirable.sum(), (~desirable).sum()]).clamp(min=1).float()
        values = {
            "sequence": sequence,
            "reference": _reference(batch),
            "chosen": desirable.float()[sequence],
            "side_share": (1 / torch.where(desirable, sides[0], sides[1]))[sequence],
            "z": _mismatched_mean(batch, mismatched).float().expand(mask.numel()),
        }
        return StepStats(
            weights=mask.float() / episodes,
            tokens=float(mask.sum()),
            live_rows=live,
            values=values,
            lengths=torch.zeros(episodes).index_add_(0, sequence, mask.float()),
        )

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """The sum over the completions whose tokens are here; `weights` is 1 / (completions of the step) at each token."""
        tokens = stats.lengths.to(outputs.logprobs)
        told = {name: _of_sequence(values[name], values["sequence"], tokens) for name in ("chosen", "side_share", "z")}
        share = _of_sequence(weights, values["sequence"], tokens)
        completions = _completions(outputs.logprobs, values, tokens)
        desirable = told["chosen"] > 0
        losses = self.options.weight * kto(completions.log_ratio, desirable, told["z"], self.options)
        total = _weighted(share, losses)
        metrics = {"loss": total.detach(), "kl": _weighted(share, told["z"])}
        reward, logp = self.options.beta * completions.log_ratio.detach(), completions.logp.detach()
        for side, here in zip(SIDES, (desirable, ~desirable), strict=True):
            side_share = torch.where(here, told["side_share"], 0.0)
            metrics[f"rewards/{side}"] = _weighted(side_share, reward)
            metrics[f"logps/{side}"] = _weighted(side_share, logp)
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return LossSum(total, metrics)


# -- sums over sequences


def _completions(logprobs: Tensor, values: dict[str, Tensor], tokens: Tensor) -> Completions:
    """[S] of all sequences; those without a token here have sums of 0."""
    sequence = values["sequence"]
    ratio = None
    if "reference" in values:
        log_ratio = logprobs - values["reference"]
        ratio = _sums(log_ratio * values["tail"] if "tail" in values else log_ratio, sequence, tokens)
    return Completions(_sums(logprobs, sequence, tokens), tokens, ratio)


def _by_side(both: Completions) -> tuple[Completions, Completions]:
    """The chosen and the rejected completions [P] of [2 P]."""
    parts = [
        Completions(both.logp[i::2], both.tokens[i::2], None if both.ratio is None else both.ratio[i::2])
        for i in (0, 1)
    ]
    return parts[0], parts[1]


def _sums(values: Tensor, sequence: Tensor, like: Tensor) -> Tensor:
    """[S] sums of `values` [M] over sequences, S being that of `like`."""
    return torch.zeros_like(like).index_add_(0, sequence, values)


def _of_sequence(values: Tensor, sequence: Tensor, like: Tensor) -> Tensor:
    """[S] the value that all tokens of a sequence have; 0 for one without a token here."""
    return torch.zeros_like(like).scatter_(0, sequence, values.to(like))


def _weighted(share: Tensor, values: Tensor) -> Tensor:
    """Scalar: sum of share * value over what has a share."""
    return torch.where(share > 0, share * values, 0.0).sum()


# -- what is known before the loss


def _reference(batch: TokenBatch) -> Tensor:
    if "reference" not in batch.extras:
        raise ValueError("the batch lacks reference log-probs; a missing one is never taken as 0")
    return torch.where(batch.loss_mask, batch.extras["reference"], 0.0)


def _check_pairs(batch: TokenBatch, sequence_of_row: Tensor, groups: Tensor) -> None:
    """Raise ValueError unless every group has exactly one chosen and one rejected completion, with trained tokens."""
    trained = batch.trained_per_row > 0
    known = torch.unique(torch.stack([sequence_of_row, batch.episode_id])[:, trained], dim=1)[0]
    completions = torch.bincount(known, minlength=2 * groups.numel()).view(-1, 2)
    wrong = (completions != 1).any(dim=1).nonzero()[:, 0]
    if wrong.numel():
        first = int(wrong[0])
        chosen, rejected = completions[first].tolist()
        raise ValueError(
            f"group {int(groups[first])} has {chosen} chosen and {rejected} rejected completions with trained tokens; a pair has one of each"
        )


def _tail_weights(mask: Tensor, sequence: Tensor, lengths: Tensor, alpha: float) -> Tensor:
    """float32 [N]: 1 for the first min(T_c, T_r) trained tokens of a completion, `alpha` for the others."""
    order = torch.argsort(sequence, stable=True)
    running = mask[order].long().cumsum(0)
    before = (lengths.long().cumsum(0) - lengths.long())[sequence[order]]
    place = torch.empty_like(running)
    place[order] = running - before
    shorter = lengths.view(-1, 2).amin(dim=1).repeat_interleave(2)[sequence]
    return torch.where(place <= shorter, 1.0, alpha)


def _numbered(ids: Tensor, rows: Tensor) -> tuple[int, Tensor, Tensor]:
    """Number of distinct ids among the marked rows, the first row of each [S], and each row's number int64 [B] (0 elsewhere)."""
    found, number = torch.unique(ids[rows], return_inverse=True)
    place = rows.nonzero()[:, 0]
    first = torch.full((found.numel(),), rows.numel(), dtype=torch.int64).scatter_reduce_(0, number, place, "amin")
    numbers = torch.zeros(rows.numel(), dtype=torch.int64)
    numbers[place] = number
    return found.numel(), first, numbers


def _mismatched_mean(batch: TokenBatch, mismatched: Tensor) -> Tensor:
    """Scalar float64: max(0, mean over mismatched completions of current - reference, summed over their tokens)."""
    if "current" not in batch.extras:
        raise ValueError("kto needs the current log-probs of a first forward pass, and the batch lacks them")
    mask = batch.loss_mask & mismatched[batch.row_of_token]
    log_ratios = (batch.extras["current"].double() - _reference(batch).double())[mask]
    completions = torch.unique(batch.episode_id[mismatched & (batch.trained_per_row > 0)]).numel()
    mean: Tensor = log_ratios.sum() / completions
    return mean.clamp(min=0)
