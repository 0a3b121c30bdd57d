"""Work on a step's batch that belongs to no rank: filters, advantages, minibatches, attached log-probs.

Hosted beside the rollout service, so that token tensors never pass through the driver.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import ray
import torch
from torch import Tensor

from nemo_rl_like.algorithms import kl
from nemo_rl_like.algorithms.episodes import Episodes
from nemo_rl_like.algorithms.shaping import kept_groups, kept_samples
from nemo_rl_like.algorithms.step import with_advantages
from nemo_rl_like.algorithms.value_losses import explained_variance
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.tokens.batch import TokenBatch, concat, with_ends


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A batch that is ready for its updates."""

    batch: ray.ObjectRef
    """TokenBatch with `advantages`."""
    minibatches: tuple[tuple[int, ...] | None, ...]
    """Rows of each update, in order; None = all rows."""
    episode_advantages: dict[int, float]
    """Mean advantage over an episode's trained tokens, by episode id."""
    metrics: dict[str, float]
    """Spread of the advantages, and what filters dropped."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What is made of a rollout batch before its updates."""

    algorithm: AlgorithmSpec
    max_new_tokens: int
    """Limit of a response, in tokens."""
    updates: int
    """Minibatches of whole groups an epoch."""
    epochs: int
    """Passes over the batch."""
    seed: int
    """Of everything that is drawn: order of groups, shuffled rewards, filters."""


class StepService:
    """Pure functions over batches behind the worker group's call."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def prepare(self, batch: TokenBatch, plan: StepPlan) -> PreparedStep:
        """Filters, advantages, and the rows of each minibatch of whole groups."""
        algorithm, before = plan.algorithm, batch.rows
        batch = filtered(batch, algorithm, plan.seed)
        dropped = {"replay_filter/dropped_rows": float(before - batch.rows)} if algorithm.replay_filter else {}
        permutation = None
        if algorithm.shuffle_rewards:
            permutation = torch.randperm(torch.unique(batch.episode_id).numel(), generator=_generator(plan.seed))
        ready = with_advantages(batch, algorithm, plan.max_new_tokens, permutation)
        if algorithm.policy_loss.kind == "clip_cov":
            ready = ready.with_extras(draws=torch.rand(batch.tokens.numel(), generator=_generator(plan.seed)))
        return PreparedStep(
            batch=ray.put(ready),
            minibatches=minibatches(batch.group_id, plan.updates, plan.epochs, plan.seed),
            episode_advantages=_episode_advantages(ready),
            metrics={**_advantage_metrics(ready, algorithm), **dropped},
        )

    def minibatches(
        self, batch: TokenBatch, updates: int, epochs: int, seed: int
    ) -> tuple[tuple[int, ...] | None, ...]:
        """Rows of each update; see `minibatches`."""
        return minibatches(batch.group_id, updates, epochs, seed)

    def attach(self, batch: TokenBatch, name: str, values: Tensor) -> ray.ObjectRef:
        """The batch with one more per-token value, float32 [N]."""
        return ray.put(batch.with_extras(**{name: values}))

    def with_ends(self, batch: TokenBatch) -> ray.ObjectRef:
        """The batch for a critic that also values the place after each row: one scored token more at every row's end."""
        return ray.put(with_ends(batch))

    def attach_values(self, batch: TokenBatch, values: Tensor, ends: bool) -> ray.ObjectRef:
        """The batch with a critic's `values`; those of `with_ends` also give the column `last_values`."""
        if not ends:
            return self.attach(batch, "values", values)
        at_end = torch.zeros(values.numel(), dtype=torch.bool)
        at_end[batch.cu_seqlens[1:] + torch.arange(batch.rows)] = True
        last = _of_last_row(batch, values[at_end])
        return ray.put(batch.with_extras(values=values[~at_end]).with_columns(last_values=last))

    def with_spread(self, batch: TokenBatch) -> tuple[ray.ObjectRef | None, int]:
        """The groups whose raw scores are not constant, and their number; None if there is none."""
        return _put_groups(batch, kept_groups(Episodes.of(batch)))

    def select_groups(self, batch: TokenBatch, low: float, high: float) -> tuple[ray.ObjectRef | None, int]:
        """The groups whose mean raw score is inside [low, high], and their number; None if there is none."""
        episodes = Episodes.of(batch)
        mean = episodes.groups.sum(episodes.rewards) / episodes.groups.sizes().clamp(min=1)
        return _put_groups(batch, (mean >= low) & (mean <= high) & (episodes.groups.sizes() > 0))

    def join(self, *batches: TokenBatch) -> ray.ObjectRef:
        """One batch of all the rows."""
        return ray.put(concat(batches))


def _put_groups(batch: TokenBatch, kept: Tensor) -> tuple[ray.ObjectRef | None, int]:
    """The rows of the groups marked in `kept` bool [G], by rising group id."""
    ids = torch.unique(batch.group_id)[kept]
    if not ids.numel():
        return None, 0
    return ray.put(batch.select(torch.isin(batch.group_id, ids).nonzero()[:, 0])), ids.numel()


def filtered(batch: TokenBatch, algorithm: AlgorithmSpec, seed: int) -> TokenBatch:
    """The rows of the samples that `replay_filter` keeps; all without one."""
    if algorithm.replay_filter is None:
        return batch
    episodes = Episodes.of(batch)
    draws = torch.rand(episodes.count, generator=_generator(seed))
    kept = torch.unique(batch.episode_id)[kept_samples(episodes, algorithm.replay_filter, draws)]
    rows = torch.isin(batch.episode_id, kept).nonzero()[:, 0]
    return batch.select(rows) if rows.numel() else batch


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


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _of_last_row(batch: TokenBatch, values: Tensor) -> Tensor:
    """[B]: on every row of an episode the value of its last one."""
    ids, of_row = torch.unique(batch.episode_id, return_inverse=True)
    last = torch.zeros(ids.numel(), dtype=torch.int64).scatter_reduce_(0, of_row, torch.arange(batch.rows), "amax")
    return values[last][of_row]


def _episode_advantages(batch: TokenBatch) -> dict[int, float]:
    ids, of_row = torch.unique(batch.episode_id, return_inverse=True)
    episode = of_row[batch.row_of_token[batch.loss_mask]]
    total = torch.zeros(ids.numel()).index_add_(0, episode, batch.extras["advantages"][batch.loss_mask])
    mean = total / torch.bincount(episode, minlength=ids.numel()).clamp(min=1)
    return dict(zip(ids.tolist(), mean.tolist(), strict=True))


def _advantage_metrics(batch: TokenBatch, algorithm: AlgorithmSpec) -> dict[str, float]:
    """Mean and std of the advantages over trained tokens, and the KL that was taken from the reward; 0 if there are no tokens."""
    mask = batch.loss_mask
    count = max(int(mask.sum()), 1)
    values = torch.where(mask, batch.extras["advantages"].double(), 0.0)
    mean = float(values.sum()) / count
    spread = float(torch.where(mask, values - mean, 0.0).square().sum()) / count
    out = {"advantages/mean": mean, "advantages/std": spread**0.5}
    if "returns" in batch.extras:
        out["value/explained_variance"] = explained_variance(
            batch.extras["returns"][mask], batch.extras["values"][mask]
        )
    if algorithm.kl.coef and algorithm.kl.place == "reward":
        x = batch.extras["proximal"] - batch.extras["reference"]
        out["kl/k1"] = float(torch.where(mask, x, 0.0).sum()) / count
        out["kl"] = float(torch.where(mask, kl.k3(x), 0.0).sum()) / count
    return out
