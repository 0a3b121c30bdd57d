"""Advantage estimators: float64 [T], one advantage for each trained token of a step's episodes, and returns for the critic.

Invalid episodes are in no mean, std or count. For estimators that compare the episodes of a group, a group whose valid rewards are all
equal, or with fewer than two valid episodes, has advantage exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_like.algorithms.episodes import EPS, Episodes, Groups, whitened
from nemo_rl_like.spec import advantages as spec


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages, and what a critic is trained towards."""

    advantages: Tensor
    """float64 [T]"""
    returns: Tensor | None = None
    """float64 [T] A + V before whitening; None without a critic."""


# -- one advantage an episode


def grpo(episodes: Episodes, options: spec.GrpoAdvantage) -> Tensor:
    """(R - mean_g) / (std_g + 1e-6), std with K-1, two-pass. Shao et al. 2024 (arXiv 2402.03300), eq. 3 with the unbiased std."""
    return episodes.groups.normalised(episodes.rewards)


def dr_grpo(episodes: Episodes, options: spec.DrGrpoAdvantage) -> Tensor:
    """R - mean_g. Liu et al. 2025 (arXiv 2503.20783)."""
    return _relative(episodes, episodes.groups.centered(episodes.rewards))


def batch_std(episodes: Episodes, options: spec.BatchStdAdvantage) -> Tensor:
    """(R - mean_g) / (std over the valid episodes of the batch + 1e-6), std with n-1."""
    std = _std(episodes.rewards[episodes.groups.valid])
    return _relative(episodes, episodes.groups.centered(episodes.rewards) / (std + EPS))


def maxrl(episodes: Episodes, options: spec.MaxRlAdvantage) -> Tensor:
    """(R - mean_g) / mean_g, 0 where mean_g = 0. Raises ValueError for a negative reward. Tajwar et al. 2026 (MaxRL)."""
    groups = episodes.groups
    lowest = torch.where(groups.valid, episodes.rewards, 0.0)
    if bool((lowest < 0).any()):
        raise ValueError(
            f"advantage `maxrl` divides by the group's mean and takes no negative reward, got {float(lowest.min())}"
        )
    mean = (groups.sum(episodes.rewards) / groups.sizes().clamp(min=1))[groups.index]
    centered = groups.centered(episodes.rewards)
    return _relative(episodes, torch.where(mean > 0, centered / torch.where(mean > 0, mean, 1.0), 0.0))


def rloo(episodes: Episodes, options: spec.RlooAdvantage) -> Tensor:
    """R - (sum_g R - R) / (K-1). Ahmadian et al. 2024 (arXiv 2402.14740), eq. 7."""
    size = episodes.groups.sizes()[episodes.groups.index]
    return _relative(episodes, episodes.groups.centered(episodes.rewards) * size / (size - 1).clamp(min=1))


def opo(episodes: Episodes, options: spec.OpoAdvantage) -> Tensor:
    """R - sum_g(len R) / sum_g(len). Hao et al. 2025 (arXiv 2505.23585)."""
    groups, length = episodes.groups, episodes.lengths.double()
    total = groups.sum(length).clamp(min=1)
    baseline = (groups.sum(length * episodes.rewards) / total)[groups.index]
    return _relative(episodes, episodes.rewards - baseline)


def pass_at_k(episodes: Episodes, options: spec.PassAtKAdvantage) -> Tensor:
    """Advantage of the best of k, over all subsets of k of the group's n valid episodes, w of them wrong (R <= 0).

    P = 1 - C(w, k) / C(n, k), s = sqrt(P (1 - P)); right: (1 - P) / s; wrong: (1 - P - C(w-1, k-1) / C(n-1, k-1)) / s; 0 where
    s = 0 or n < k. Chen et al. 2025, "Pass@k Training" (arXiv 2508.10751).
    """
    groups, k = episodes.groups, options.k
    right = groups.valid & (episodes.rewards > 0)
    n = groups.sizes()
    wrong = n - groups.sum(right.double())
    fail = _share(wrong, n, k)
    spread = (fail * (1 - fail)).sqrt()
    alive = (spread > 0) & (n >= k)
    scale = torch.where(alive, 1 / torch.where(alive, spread, 1.0), 0.0)
    of_right = fail * scale
    of_wrong = (fail - _share(wrong - 1, n - 1, k - 1)) * scale
    return torch.where(groups.valid, torch.where(right, of_right[groups.index], of_wrong[groups.index]), 0.0)


def gdpo(episodes: Episodes, options: spec.GdpoAdvantage) -> Tensor:
    """Each part normalised in its group, weighted sum, divided by its std over the valid episodes + 1e-6, std with n-1.

    The mean over the episodes is 0, since each group's is; it is not subtracted, so that a group without spread stays at exactly 0.
    Liu et al. 2026 (GDPO, arXiv 2601.05242).
    """
    weights = options.weights or dict.fromkeys(episodes.parts, 1.0)
    missing = sorted(set(weights) - set(episodes.parts))
    if missing:
        raise ValueError(
            f"advantage `gdpo` weighs {', '.join(missing)}, but the environment's rewards are {', '.join(episodes.parts) or 'one sum'}"
        )
    total = torch.zeros(episodes.count, dtype=torch.float64)
    for name, weight in weights.items():
        total += weight * episodes.groups.normalised(episodes.parts[name])
    return total / (_std(total[episodes.groups.valid]) + EPS)


def reinforce(episodes: Episodes, options: spec.ReinforceAdvantage) -> Tensor:
    """R itself, no baseline. Williams 1992."""
    return torch.where(episodes.groups.valid, episodes.rewards, 0.0)


def remax(episodes: Episodes, options: spec.RemaxAdvantage) -> Tensor:
    """R - R(greedy answer), 0 where that answer could not be scored (NaN). Li et al. 2023 (arXiv 2310.10505)."""
    if episodes.greedy is None:
        raise ValueError("advantage `remax` needs the reward of each prompt's greedy answer; the batch has none")
    known = episodes.groups.valid & ~episodes.greedy.isnan()
    return torch.where(known, episodes.rewards - episodes.greedy, 0.0)


# -- one advantage a token


def gigpo(episodes: Episodes, options: spec.GigpoAdvantage) -> Estimate:
    """GRPO's advantage plus w (G_k - mean) / (std + 1e-6) over the turns of a group that start from the same state.

    G_k = sum over the episode's turns l >= k of gamma^(l-k) r_l. Feng et al. 2025 (arXiv 2505.10978).
    """
    if episodes.turn is None or episodes.anchor is None:
        raise ValueError("advantage `gigpo` needs turns and the states they start from; the batch has none")
    turns = _Turns.of(episodes, episodes.turn, episodes.anchor)
    step = turns.groups.normalised(turns.returns(options.gamma))
    whole = episodes.over_tokens(episodes.groups.normalised(episodes.rewards))
    return Estimate(whole + options.step_weight * step[turns.of_token])


def reinforce_pp(episodes: Episodes, options: spec.ReinforcePpAdvantage) -> Estimate:
    """G_t = sum_{s >= t} gamma^(s-t) R_s, then (G - mean) / std over all trained tokens. Hu 2025 (arXiv 2501.03262)."""
    return Estimate(whitened(episodes.scan_back(episodes.rewards_by_token(), options.gamma)))


def reinforce_pp_baseline(episodes: Episodes, options: spec.ReinforcePpBaselineAdvantage) -> Estimate:
    """REINFORCE++ with R - mean_g in the place of R. Hu 2025 (arXiv 2501.03262)."""
    centered = episodes.with_rewards(episodes.groups.centered(episodes.rewards))
    return Estimate(whitened(centered.scan_back(centered.rewards_by_token(), options.gamma)))


def gae(episodes: Episodes, options: spec.GaeAdvantage) -> Estimate:
    """delta_t = R_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; returns A + V. Schulman et al. 2016 (arXiv 1506.02438)."""
    delta = _deltas(episodes, options.gamma, options.bootstrap_truncated)
    advantage = episodes.scan_back(delta, options.gamma * options.lam)
    returns = advantage + episodes.critic_values()
    return Estimate(whitened(advantage) if options.whiten else advantage, returns)


def vapo(episodes: Episodes, options: spec.VapoAdvantage) -> Estimate:
    """GAE with lambda 1 - 1 / (alpha T_i) for the policy and 1 for the critic. Yue et al. 2025 (arXiv 2504.05118)."""
    delta = _deltas(episodes, options.gamma, options.bootstrap_truncated)
    lam = (1 - 1 / (options.alpha * episodes.lengths.clamp(min=1).double())).clamp(min=0)
    advantage = episodes.scan_back(delta, options.gamma * lam)
    returns = episodes.scan_back(delta, options.gamma) + episodes.critic_values()
    return Estimate(whitened(advantage) if options.whiten else advantage, returns)


BY_EPISODE: dict[str, Callable[[Episodes, Any], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "batch_std": batch_std,
    "maxrl": maxrl,
    "rloo": rloo,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
    "reinforce": reinforce,
    "remax": remax,
}
"""[E] advantages by name."""
BY_TOKEN: dict[str, Callable[[Episodes, Any], Estimate]] = {
    "gigpo": gigpo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": gae,
    "vapo": vapo,
}
"""[T] advantages by name."""
FROM_RETURNS = frozenset(BY_TOKEN) - {"gigpo"}
"""Estimators that read rewards token by token only: a KL in the reward enters their returns, not the score they compare."""


def estimate(options: spec.AdvantageSpec, episodes: Episodes) -> Estimate:
    """Advantages of the trained tokens, by the estimator that `options` names."""
    if options.kind in BY_TOKEN:
        return BY_TOKEN[options.kind](episodes, options)
    return Estimate(episodes.over_tokens(BY_EPISODE[options.kind](episodes, options)))


def _relative(episodes: Episodes, advantage: Tensor) -> Tensor:
    return episodes.groups.where_spread(episodes.rewards, advantage)


def _std(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else torch.zeros((), dtype=torch.float64)


def _share(part: Tensor, whole: Tensor, k: int) -> Tensor:
    """C(part, k) / C(whole, k), float64; 0 where part < k or whole < k."""
    out = torch.ones_like(part)
    for i in range(k):
        left, right = part - i, whole - i
        out = out * torch.where((left > 0) & (right > 0), left / right.clamp(min=1), 0.0)
    return out


def _deltas(episodes: Episodes, gamma: float, bootstrap: bool) -> Tensor:
    last = None
    if bootstrap:
        if episodes.truncated is None or episodes.last_values is None:
            raise ValueError(
                "`bootstrap_truncated` needs to know which episodes were cut, and the critic's last values"
            )
        last = torch.where(episodes.truncated, episodes.last_values, 0.0)
    return episodes.rewards_by_token() + gamma * episodes.next_values(last) - episodes.critic_values()


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of a step, episode after episode."""

    episodes: Episodes
    of_token: Tensor
    """int64 [T] turn of each trained token, counted over the step."""
    as_episodes: Episodes
    """The same episodes with turns in the place of tokens, each with its reward."""
    groups: Groups
    """Turns by state."""

    @classmethod
    def of(cls, episodes: Episodes, turn: Tensor, anchor: Tensor) -> _Turns:
        """Number the turns; T must not be 0 for the result to hold any."""
        width = int(turn.max()) + 1 if turn.numel() else 1
        key, of_token = torch.unique(episodes.episode * width + turn, return_inverse=True)
        owner = key // width
        rewards = torch.zeros(key.numel(), dtype=torch.float64).index_add_(0, of_token, episodes.rewards_by_token())
        state = torch.zeros(key.numel(), dtype=torch.int64).scatter_(0, of_token, anchor)
        group = episodes.groups.index[owner]
        states = int(state.max()) + 1 if state.numel() else 1
        valid = episodes.groups.valid[owner]
        as_episodes = Episodes(
            groups=episodes.groups,
            rewards=episodes.rewards,
            place=key,
            episode=owner,
            lengths=torch.bincount(owner, minlength=episodes.count),
            token_rewards=rewards,
        )
        return cls(episodes, of_token, as_episodes, Groups.of(group * states + state, valid))

    def returns(self, gamma: float) -> Tensor:
        """float64, one a turn: its discounted return, per turn."""
        return self.as_episodes.scan_back(self.as_episodes.rewards_by_token(), gamma)
