"""From a rollout batch to its advantages: shaping, KL in the reward, estimator, distillation. Once a step, without gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nemo_rl_like.algorithms.advantages import FROM_RETURNS, estimate
from nemo_rl_like.algorithms.episodes import Episodes
from nemo_rl_like.algorithms.shaping import shaped
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.kl import KlSpec
from nemo_rl_like.tokens.batch import TokenBatch


def with_advantages(
    batch: TokenBatch, algorithm: AlgorithmSpec, max_new_tokens: int, permutation: Tensor | None = None
) -> TokenBatch:
    """The batch with `advantages` [N], and `returns` [N] where there is a critic; 0 at tokens that are not trained.

    Rows of one episode (its segments) count once in their group. `permutation` int64 [E] reassigns the rewards of the
    episodes before anything else (control experiments). Reads `proximal`, `reference`, `teacher` and `values` where the algorithm does.
    Raises ValueError if one of them is missing.
    """
    episodes = _episodes(batch)
    if permutation is not None:
        episodes = _permuted(episodes, permutation)
    episodes = shaped(episodes, algorithm.shaping, max_new_tokens)
    if algorithm.kl.coef and algorithm.kl.place == "reward":
        episodes = _with_kl(episodes, batch, algorithm.kl, in_return=algorithm.advantage.kind in FROM_RETURNS)
    found = estimate(algorithm.advantage, episodes)
    advantages = found.advantages
    if algorithm.distill_coef:
        teacher, proximal = (_extra(batch, name)[episodes.place].double() for name in ("teacher", "proximal"))
        advantages = advantages + algorithm.distill_coef * (teacher - proximal)
    extras = {"advantages": advantages}
    if found.returns is not None:
        extras["returns"] = found.returns
    return batch.with_extras(**{name: _on_all(batch, episodes, values) for name, values in extras.items()})


def _episodes(batch: TokenBatch) -> Episodes:
    """The batch's episodes with everything that it knows of them."""
    episodes = Episodes.of(batch)
    _, first = batch.episodes()
    columns = {name: values[first] for name, values in batch.columns.items()}
    at = {name: values[episodes.place] for name, values in batch.extras.items()}
    episodes = replace(
        episodes,
        greedy=columns["greedy"].double() if "greedy" in columns else None,
        opponent=columns["opponent"].double() if "opponent" in columns else None,
        truncated=columns["truncated"].bool() if "truncated" in columns else None,
        last_values=columns["last_values"].double() if "last_values" in columns else None,
        values=at["values"].double() if "values" in at else None,
        turn=at["turn"].long() if "turn" in at else None,
        anchor=at["anchor"].long() if "anchor" in at else None,
    )
    if "turn_rewards" not in at:
        return episodes
    fallen = at["turn_rewards"].double()
    rest = torch.where(episodes.groups.valid, episodes.rewards - episodes.sum_tokens(fallen), 0.0)
    return replace(episodes, token_rewards=episodes.at_last(rest, fallen))


def _permuted(episodes: Episodes, permutation: Tensor) -> Episodes:
    rewards = episodes.rewards[permutation]
    groups = replace(episodes.groups, valid=episodes.groups.valid & ~rewards.isnan())
    return replace(episodes, rewards=rewards, groups=groups, token_rewards=None)


def _with_kl(episodes: Episodes, batch: TokenBatch, kl: KlSpec, *, in_return: bool) -> Episodes:
    """coef (proximal - reference) taken from each token's reward and, unless only returns are read, from the episode's."""
    proximal, reference = (_extra(batch, name)[episodes.place].double() for name in ("proximal", "reference"))
    price = kl.coef * (proximal - reference)
    by_token = episodes.rewards_by_token() - price
    rewards = episodes.rewards if in_return else episodes.rewards - episodes.sum_tokens(price)
    return replace(episodes, rewards=rewards, token_rewards=by_token)


def _extra(batch: TokenBatch, name: str) -> Tensor:
    if name not in batch.extras:
        raise ValueError(f"the batch lacks {name}; a missing one is never taken as 0")
    return batch.extras[name]


def _on_all(batch: TokenBatch, episodes: Episodes, values: Tensor) -> Tensor:
    """float32 [N] from [T]; 0 elsewhere."""
    out = torch.zeros(batch.tokens.numel())
    out[episodes.place] = values.float()
    return out
