"""Advantage estimators that compare the episodes of a group. Each maps [E] rewards to [E] advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Groups:
    """Which group each of E episodes belongs to, and which episodes count.

    `index` int64 [E] is in 0..count-1; `valid` bool [E] is false where an episode could not be scored.
    """

    index: Tensor
    valid: Tensor
    count: int

    @classmethod
    def of(cls, group_id: Tensor, valid: Tensor) -> Groups:
        """Number the distinct `group_id` int64 [E]; linear in E, prompts are never compared."""
        ids, index = torch.unique(group_id, return_inverse=True)
        return cls(index=index, valid=valid, count=ids.numel())

    def sum(self, values: Tensor) -> Tensor:
        """float64 [G] sum over the valid episodes of each group."""
        safe = torch.where(self.valid, values.double(), 0.0)
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.index, safe)

    def sizes(self) -> Tensor:
        """float64 [G] number of valid episodes of each group."""
        return self.sum(torch.ones_like(self.index, dtype=torch.float64))

    def spread(self, values: Tensor) -> Tensor:
        """bool [G] true where at least two valid episodes have different values (max > min, never a float std)."""
        low = torch.full((self.count,), torch.inf, dtype=torch.float64)
        high = -low
        safe = values.double()
        low.scatter_reduce_(0, self.index, torch.where(self.valid, safe, torch.inf), "amin")
        high.scatter_reduce_(0, self.index, torch.where(self.valid, safe, -torch.inf), "amax")
        return high > low


def _centered(rewards: Tensor, groups: Groups) -> Tensor:
    mean = groups.sum(rewards) / groups.sizes().clamp(min=1)
    return torch.where(groups.valid, rewards.double() - mean[groups.index], 0.0)


def grpo(rewards: Tensor, groups: Groups) -> Tensor:
    """(R - mean_g) / (std_g + 1e-6), std with K-1, two-pass. Shao et al. 2024 (arXiv 2402.03300), eq. 3 with the unbiased std."""
    centered = _centered(rewards, groups)
    variance = groups.sum(centered.square()) / (groups.sizes() - 1).clamp(min=1)
    return centered / (variance.sqrt()[groups.index] + EPS)


def dr_grpo(rewards: Tensor, groups: Groups) -> Tensor:
    """R - mean_g. Liu et al. 2025 (arXiv 2503.20783)."""
    return _centered(rewards, groups)


def batch_std(rewards: Tensor, groups: Groups) -> Tensor:
    """(R - mean_g) / (std over the valid episodes of the batch + 1e-6), std with n-1."""
    valid = rewards.double()[groups.valid]
    std = valid.std() if valid.numel() > 1 else torch.zeros((), dtype=torch.float64)
    return _centered(rewards, groups) / (std + EPS)


def rloo(rewards: Tensor, groups: Groups) -> Tensor:
    """R - (sum_g R - R) / (K-1). Ahmadian et al. 2024 (arXiv 2402.14740), eq. 7."""
    size = groups.sizes()[groups.index]
    return _centered(rewards, groups) * size / (size - 1).clamp(min=1)


def reinforce(rewards: Tensor, groups: Groups) -> Tensor:
    """R itself, no baseline. Williams 1992."""
    return torch.where(groups.valid, rewards.double(), 0.0)


ESTIMATORS: dict[str, Callable[[Tensor, Groups], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "batch_std": batch_std,
    "rloo": rloo,
    "reinforce": reinforce,
}
GROUP_RELATIVE = frozenset({"grpo", "dr_grpo", "batch_std", "rloo"})


def estimate(name: str, rewards: Tensor, group_id: Tensor, valid: Tensor) -> Tensor:
    """Advantage of each episode, float32 [E].

    Args: `name` one of `ESTIMATORS`; `rewards` [E], may be NaN where invalid; `group_id` int64 [E]; `valid` bool [E].
    Invalid episodes get 0. For the group-relative estimators a group whose valid rewards are all equal, or with
    fewer than two valid episodes, gets exactly 0.
    Raises KeyError for an unknown name.
    """
    groups = Groups.of(group_id, valid)
    advantage = ESTIMATORS[name](rewards, groups)
    alive = valid
    if name in GROUP_RELATIVE:
        alive = alive & groups.spread(rewards)[groups.index]
    return torch.where(alive, advantage, 0.0).float()
