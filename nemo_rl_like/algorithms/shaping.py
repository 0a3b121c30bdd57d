"""Reward shaping, in the order that the spec lists it, and the filters that look at raw scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_like.algorithms.episodes import Episodes
from nemo_rl_like.spec import shaping as spec


def overlong(rewards: Tensor, episodes: Episodes, options: spec.OverlongShaping, limit: int) -> Tensor:
    """R + coef * p, p = 0 up to L - c tokens, (L - c - y) / c up to L, -1 beyond. Yu et al. 2025 (DAPO, arXiv 2503.14476)."""
    end = options.limit or limit
    cache = options.cache or max(1, end // 5)
    over = episodes.lengths.double() - (end - cache)
    return rewards - options.coef * (over / cache).clamp(0, 1)


def stop_properly(rewards: Tensor, episodes: Episodes, options: spec.StopProperlyShaping, limit: int) -> Tensor:
    """Where the episode was cut: R * coef for coef in [0, 1], coef itself below 0."""
    if episodes.truncated is None:
        raise ValueError("shaping `stop_properly` needs to know which episodes were cut; the batch does not say")
    cut = rewards * options.coef if options.coef >= 0 else torch.full_like(rewards, options.coef)
    return torch.where(episodes.truncated, cut, rewards)


def clip(rewards: Tensor, episodes: Episodes, options: spec.ClipShaping, limit: int) -> Tensor:
    """min(max(R, low), high)."""
    return rewards.clamp(options.low, options.high)


def scale(rewards: Tensor, episodes: Episodes, options: spec.ScaleShaping, limit: int) -> Tensor:
    """factor * R."""
    return options.factor * rewards


def length_penalty(rewards: Tensor, episodes: Episodes, options: spec.LengthPenaltyShaping, limit: int) -> Tensor:
    """R - coef * max(0, y - free); y counts sampled tokens only."""
    return rewards - options.coef * (episodes.lengths.double() - options.free_tokens).clamp(min=0)


def win_rate(rewards: Tensor, episodes: Episodes, options: spec.WinRateShaping, limit: int) -> Tensor:
    """P(R beats R') - 1/2, R' the opponent's reward. Munos et al. 2023 (Nash-MD, arXiv 2312.00886), eq. 7."""
    if episodes.opponent is None:
        raise ValueError("shaping `win_rate` needs an opponent's rewards; the batch has none")
    ahead = rewards - episodes.opponent
    return ahead.sigmoid() - 0.5 if options.compare == "bradley_terry" else ahead.sign() / 2


SHAPINGS: dict[str, Callable[[Tensor, Episodes, Any, int], Tensor]] = {
    "overlong": overlong,
    "stop_properly": stop_properly,
    "clip": clip,
    "scale": scale,
    "length_penalty": length_penalty,
    "win_rate": win_rate,
}


def shaped(episodes: Episodes, shaping: Sequence[spec.ShapingSpec], max_new_tokens: int) -> Episodes:
    """The episodes with their rewards changed in order; invalid ones stay NaN."""
    rewards = episodes.rewards
    for options in shaping:
        rewards = SHAPINGS[options.kind](rewards, episodes, options, max_new_tokens)
    return episodes.with_rewards(torch.where(episodes.groups.valid, rewards, torch.nan)) if shaping else episodes


def kept_groups(episodes: Episodes) -> Tensor:
    """bool [G]: groups whose raw scores are not constant (dynamic sampling). Give it episodes before shaping."""
    return episodes.groups.spread(episodes.rewards)


def kept_samples(episodes: Episodes, options: spec.ReplayFilterSpec, draws: Tensor) -> Tensor:
    """bool [E]: the samples of each group that are trained: `keep` of the valid ones, by reward.

    `best`: the highest; `best_worst`: highest and lowest, one more of the highest if `keep` is odd; `best_random`: the highest half and,
    of the others, those with the smallest `draws` [E] in [0, 1). Ties go to the earlier episode. Shen & Zhang 2024 (PF-PPO,
    arXiv 2409.06957), section 3.2.
    """
    top = options.keep if options.rule == "best" else (options.keep + 1) // 2
    high = _rank(episodes, -episodes.rewards) < top
    if options.rule == "best":
        return high & episodes.groups.valid
    other = episodes.rewards if options.rule == "best_worst" else draws.double()
    behind = torch.where(high, torch.inf, other)
    return (high | (_rank(episodes, behind) < options.keep - top)) & episodes.groups.valid


def _rank(episodes: Episodes, key: Tensor) -> Tensor:
    """int64 [E] place of each episode in its group by rising key; invalid ones last."""
    groups = episodes.groups
    by_key = torch.argsort(torch.where(groups.valid, key.double(), torch.inf), stable=True)
    order = by_key[torch.argsort(groups.index[by_key], stable=True)]
    sizes = torch.bincount(groups.index, minlength=groups.count)
    first = sizes.cumsum(0) - sizes
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel()) - first[groups.index[order]]
    return rank
