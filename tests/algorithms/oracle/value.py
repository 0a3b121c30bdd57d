"""Section 7 of numerics.md: losses of value and reward models, of one token and one pair."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(value: Tensor, target: float, old: float, clip: float | None) -> Tensor:
    """.5 max((V - ret)^2, (V_old + clip(V - V_old, +-c) - ret)^2); without c: .5 (V - ret)^2."""
    plain = (value - target) ** 2
    if clip is None:
        return 0.5 * plain
    moved = value - old
    if moved.item() > clip:
        moved = torch.tensor(clip, dtype=torch.float64)
    elif moved.item() < -clip:
        moved = torch.tensor(-clip, dtype=torch.float64)
    clipped = (old + moved - target) ** 2
    return 0.5 * (plain if plain.item() >= clipped.item() else clipped)


def reward_model_loss(chosen: Tensor, rejected: Tensor, margin: float = 0.0, center: float = 0.0) -> Tensor:
    """-logsigmoid(s_c - s_r - margin) + center (s_c + s_r)^2."""
    return torch.log(1 + torch.exp(-(chosen - rejected - margin))) + center * (chosen + rejected) ** 2


def rating_loss(score: Tensor, target: float) -> Tensor:
    """(s - y)^2."""
    return (score - target) ** 2


def step_loss(score: Tensor, label: float) -> Tensor:
    """-y log sigmoid(s) - (1 - y) log(1 - sigmoid(s))."""
    right = 1 / (1 + torch.exp(-score))
    return -label * torch.log(right) - (1 - label) * torch.log(1 - right)
