"""Section 6 of numerics.md: changes of the reward, and dynamic sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.shaping import (
    ClipShaping,
    LengthPenaltyShaping,
    OverlongShaping,
    ScaleShaping,
    StopProperlyShaping,
    WinRateShaping,
)

from .samples import Sample, trained, valid_groups


def shaped(algorithm: AlgorithmSpec, samples: list[Sample], max_new_tokens: int | None = None) -> list[float]:
    """Every sample's reward after the list of shapings, in order; NaN where invalid."""
    rewards = []
    for sample in samples:
        reward = sample.reward
        for spec in algorithm.shaping:
            reward = SHAPINGS[spec.kind](spec, sample, reward, max_new_tokens)
        rewards.append(reward if sample.valid else math.nan)
    return rewards


def kept_groups(samples: list[Sample]) -> set[int]:
    """Dynamic sampling: the groups whose valid samples' raw rewards are not all equal."""
    kept = set()
    for group, members in valid_groups(samples).items():
        rewards = [samples[i].reward for i in members]
        if max(rewards) != min(rewards):
            kept.add(group)
    return kept


def overlong_penalty(y: int, limit: int, cache: int) -> float:
    """0 up to L - c; (L - c - y) / c up to L; -1 beyond."""
    if y <= limit - cache:
        return 0.0
    if y <= limit:
        return (limit - cache - y) / cache
    return -1.0


def overlong(spec: OverlongShaping, sample: Sample, reward: float, max_new_tokens: int | None) -> float:
    """R + coef * penalty, y = T_i. L: the spec's limit, else max_new_tokens, else (not given) the sample's limit."""
    limit = spec.limit
    if limit is None:
        limit = max_new_tokens
    if limit is None:
        limit = sample.limit
    return reward + spec.coef * overlong_penalty(len(trained(sample)), limit, spec.cache)


def stop_properly(spec: StopProperlyShaping, sample: Sample, reward: float, max_new_tokens: int | None) -> float:
    """Truncated: R * coef for coef in [0, 1], coef itself below 0."""
    if not sample.truncated:
        return reward
    return spec.coef if spec.coef < 0 else reward * spec.coef


def clip(spec: ClipShaping, sample: Sample, reward: float, max_new_tokens: int | None) -> float:
    """R bounded to [low, high]."""
    return min(max(reward, spec.low), spec.high)


def scale(spec: ScaleShaping, sample: Sample, reward: float, max_new_tokens: int | None) -> float:
    """R * factor."""
    return reward * spec.factor


def length_penalty(spec: LengthPenaltyShaping, sample: Sample, reward: float, max_new_tokens: int | None) -> float:
    """R - coef * max(0, T_i - free_tokens)."""
    return reward - spec.coef * max(0, len(trained(sample)) - spec.free_tokens)


def win_rate(spec: WinRateShaping, sample: Sample, reward: float, max_new_tokens: int | None) -> float:
    """P(the sample beats the opponent's) - 1/2: from a Bradley-Terry model of the two rewards, or 1, 1/2, 0 (2312.00886)."""
    if spec.compare == "bradley_terry":
        return 1 / (1 + math.exp(sample.opponent - reward)) - 0.5
    if reward == sample.opponent:
        return 0.0
    return 0.5 if reward > sample.opponent else -0.5


SHAPINGS: dict[str, Callable[[Any, Sample, float, int | None], float]] = {
    "overlong": overlong,
    "stop_properly": stop_properly,
    "clip": clip,
    "scale": scale,
    "length_penalty": length_penalty,
    "win_rate": win_rate,
}
