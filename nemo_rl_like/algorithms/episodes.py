"""`Episodes`: what advantage estimators read of a step, and the sums, spreads and recursions they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemo_rl_like.tokens.batch import TokenBatch

EPS = 1e-6
VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class Groups:
    """Which of `count` groups each of n members belongs to, and which members count.

    `index` int64 [n] is in 0..count-1; `valid` bool [n] is false where a member could not be scored.
    """

    index: Tensor
    valid: Tensor
    count: int

    @classmethod
    def of(cls, group_id: Tensor, valid: Tensor) -> Groups:
        """Number the distinct `group_id` int64 [n]; linear in n but for a sort, prompts are never compared."""
        ids, index = torch.unique(group_id, return_inverse=True)
        return cls(index=index, valid=valid, count=ids.numel())

    def sum(self, values: Tensor) -> Tensor:
        """float64 [count] sum over the valid members of each group."""
        safe = torch.where(self.valid, values.double(), 0.0)
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.index, safe)

    def sizes(self) -> Tensor:
        """float64 [count] number of valid members of each group."""
        return self.sum(torch.ones_like(self.index, dtype=torch.float64))

    def centered(self, values: Tensor) -> Tensor:
        """float64 [n] value minus the group's mean; 0 where not valid."""
        mean = self.sum(values) / self.sizes().clamp(min=1)
        return torch.where(self.valid, values.double() - mean[self.index], 0.0)

    def normalised(self, values: Tensor) -> Tensor:
        """float64 [n] (value - mean) / (std + 1e-6), std with K-1 in two passes; exactly 0 in a group without spread."""
        centered = self.centered(values)
        variance = self.sum(centered.square()) / (self.sizes() - 1).clamp(min=1)
        return self.where_spread(values, centered / (variance.sqrt()[self.index] + EPS))

    def spread(self, values: Tensor) -> Tensor:
        """bool [count] true where at least two valid members have different values (max > min, never a float std)."""
        low = torch.full((self.count,), torch.inf, dtype=torch.float64)
        high = -low
        safe = values.double()
        low.scatter_reduce_(0, self.index, torch.where(self.valid, safe, torch.inf), "amin")
        high.scatter_reduce_(0, self.index, torch.where(self.valid, safe, -torch.inf), "amax")
        return high > low

    def where_spread(self, values: Tensor, result: Tensor) -> Tensor:
        """`result` [n] of the valid members of groups whose `values` differ, 0 for the others."""
        return torch.where(self.valid & self.spread(values)[self.index], result, 0.0)


@dataclass(frozen=True, slots=True)
class Episodes:
    """The E episodes of a step and their T trained tokens, episode after episode, in the order they were sampled."""

    groups: Groups
    """Episodes by drawn prompt."""
    rewards: Tensor
    """float64 [E] reward that enters the estimator; NaN where invalid."""
    place: Tensor
    """int64 [T] place of each trained token among the batch's N."""
    episode: Tensor
    """int64 [T] episode of each trained token."""
    lengths: Tensor
    """int64 [E] trained tokens of each episode."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """float64 [E] parts of the reward by name."""
    greedy: Tensor | None = None
    """float64 [E] reward of the greedy answer to the episode's prompt."""
    opponent: Tensor | None = None
    """float64 [E] reward of the opponent's answer to the episode's prompt."""
    truncated: Tensor | None = None
    """bool [E] whether a limit cut the episode."""
    token_rewards: Tensor | None = None
    """float64 [T] rewards where they fell; None: all of it on the last trained token."""
    values: Tensor | None = None
    """float64 [T] critic's value at the place that predicts the token."""
    last_values: Tensor | None = None
    """float64 [E] critic's value after the last trained token."""
    turn: Tensor | None = None
    """int64 [T] turn of each trained token within its episode, from 0."""
    anchor: Tensor | None = None
    """int64 [T] number of the state that the token's turn started from; equal states of a group have equal numbers."""

    @classmethod
    def of(cls, batch: TokenBatch, reward: str = "reward") -> Episodes:
        """The episodes of a batch. Rows of one episode, its segments, stand in the batch in their order."""
        of_row, first = batch.episodes()
        rewards = batch.rewards[reward][first].double()
        valid = batch.valid[first] & ~rewards.isnan()
        of_token = of_row[batch.row_of_token]
        trained = batch.loss_mask.nonzero()[:, 0]
        place = trained[torch.argsort(of_token[trained], stable=True)]
        episode = of_token[place]
        return cls(
            groups=Groups.of(batch.group_id[first], valid),
            rewards=torch.where(valid, rewards, torch.nan),
            place=place,
            episode=episode,
            lengths=torch.bincount(episode, minlength=first.numel()),
            parts={name: values[first].double() for name, values in batch.rewards.items() if name != reward},
        )

    @property
    def count(self) -> int:
        """E."""
        return self.rewards.numel()

    @property
    def ends(self) -> Tensor:
        """int64 [E] one past the last trained token of each episode among the T."""
        return self.lengths.cumsum(0)

    def with_rewards(self, rewards: Tensor) -> Episodes:
        """The same episodes with other rewards [E]; what changed is added to the last trained token's."""
        token_rewards = self.token_rewards
        if token_rewards is not None:
            token_rewards = self.at_last(rewards - self.rewards, token_rewards)
        return replace(self, rewards=rewards, token_rewards=token_rewards)

    def at_last(self, values: Tensor, onto: Tensor | None = None) -> Tensor:
        """float64 [T]: `values` [E] added at the last trained token of each episode that has one, to `onto` or zeros."""
        out = torch.zeros(self.place.numel(), dtype=torch.float64) if onto is None else onto.clone()
        alive = (self.lengths > 0) & self.groups.valid
        out[self.ends[alive] - 1] += values.double()[alive]
        return out

    def rewards_by_token(self) -> Tensor:
        """float64 [T] rewards where they fell."""
        return self.at_last(self.rewards) if self.token_rewards is None else self.token_rewards

    def over_tokens(self, values: Tensor) -> Tensor:
        """float64 [T]: `values` [E] on each of the episode's tokens."""
        return values.double()[self.episode]

    def sum_tokens(self, values: Tensor) -> Tensor:
        """float64 [E] sum of `values` [T] over each episode."""
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.episode, values.double())

    def scan_back(self, values: Tensor, decay: Tensor | float) -> Tensor:
        """float64 [T] y_t = values_t + decay * y_{t+1}, 0 behind each episode's last token; `decay` a number or [E]."""
        by_episode = torch.as_tensor(decay, dtype=torch.float64).expand(self.count)
        order = torch.argsort(self.lengths, descending=True, stable=True)
        last, rate = self.ends[order] - 1, by_episode[order]
        alive = _alive(self.lengths)
        out = values.double().clone()
        carry = torch.zeros(self.count, dtype=torch.float64)
        for back, count in enumerate(alive):
            at = last[:count] - back
            carry = out[at] + rate[:count] * carry[:count]
            out[at] = carry
        return out

    def critic_values(self) -> Tensor:
        """float64 [T] `values`. Raises ValueError without a critic."""
        if self.values is None:
            raise ValueError("this advantage needs a critic: the batch has no `values`")
        return self.values

    def next_values(self, last: Tensor | None = None) -> Tensor:
        """float64 [T] the value of the next trained token of the episode; behind the last one 0, or `last` [E]."""
        values = self.critic_values()
        out = torch.zeros_like(values)
        out[:-1] = values[1:]
        alive = self.lengths > 0
        out[self.ends[alive] - 1] = 0.0 if last is None else last.double()[alive]
        return out


def _alive(lengths: Tensor) -> list[int]:
    """For each distance from the end, how many episodes are longer than it."""
    counts = torch.bincount(lengths)
    longer: list[int] = (lengths.numel() - counts.cumsum(0))[:-1].tolist()
    return longer


def whitened(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(max(variance, 1e-8)) over all of [T], variance with 1/T; empty stays empty."""
    if not values.numel():
        return values
    centered = values - values.mean()
    return centered / centered.square().mean().clamp(min=VARIANCE_FLOOR).sqrt()
