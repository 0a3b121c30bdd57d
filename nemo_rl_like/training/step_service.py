"""Work on a step's batch that belongs to no rank: advantages, minibatches, attached log-probs, the record of rollouts.

Hosted beside the rollout service, so that token tensors never pass through the driver.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import ray
import torch
from torch import Tensor

from nemo_rl_like.algorithms.objectives import with_advantages
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.tokens.batch import TokenBatch


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """How advantages are made of rewards."""

    estimator: str
    """Name in `algorithms.advantages.ESTIMATORS`."""
    shuffle_seed: int | None = None
    """Permute the rewards over the step's episodes first (control experiment)."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A batch that is ready for its updates."""

    batch: ray.ObjectRef
    """TokenBatch with `advantages`."""
    minibatches: tuple[tuple[int, ...] | None, ...]
    """Rows of each update, in order; None = all rows."""
    episode_advantages: dict[int, float]
    """Advantage by episode id."""


class StepService:
    """Pure functions over batches behind the worker group's call."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def prepare(
        self, batch: TokenBatch, advantage: AdvantageSpec, updates: int, epochs: int, seed: int
    ) -> PreparedStep:
        """Advantages, and the rows of each of `epochs` x `updates` minibatches of whole groups."""
        episodes = torch.unique(batch.episode_id)
        permutation = _permutation(episodes.numel(), advantage.shuffle_seed)
        ready = with_advantages(batch, advantage.estimator, permutation=permutation)
        return PreparedStep(
            batch=ray.put(ready),
            minibatches=minibatches(batch.group_id, updates, epochs, seed),
            episode_advantages=_episode_advantages(ready),
        )

    def attach(self, batch: TokenBatch, name: str, values: Tensor) -> ray.ObjectRef:
        """The batch with one more per-token value, float32 [N]."""
        return ray.put(batch.with_extras(**{name: values}))


def minibatches(group_id: Tensor, updates: int, epochs: int, seed: int) -> tuple[tuple[int, ...] | None, ...]:
    """Rows of each update: whole groups, dealt as evenly as they go, in a new order each epoch.

    A single update takes all rows in order (None).
    """
    if updates == 1:
        return (None,) * epochs
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_id.tolist()):
        groups.setdefault(group, []).append(row)
    out: list[tuple[int, ...] | None] = []
    for epoch in range(epochs):
        order = sorted(groups)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        count = min(updates, len(order))
        out.extend(tuple(row for g in order[i::count] for row in groups[g]) for i in range(count))
    return tuple(out)


def _permutation(count: int, seed: int | None) -> Tensor | None:
    if seed is None:
        return None
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _episode_advantages(batch: TokenBatch) -> dict[int, float]:
    rows = batch.row_of_token[batch.loss_mask]
    values = torch.zeros(batch.rows).index_copy_(0, rows, batch.extras["advantages"][batch.loss_mask])
    return dict(zip(batch.episode_id.tolist(), values.tolist(), strict=True))
