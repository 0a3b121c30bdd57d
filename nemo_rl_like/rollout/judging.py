"""Reward models as judges of finished episodes: the rows they read, one score an episode, and the reward that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from nemo_rl_like.rollout.episode import Episode
from nemo_rl_like.spec.reward_model import ProcessScores, RewardModelSpec
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows
from nemo_rl_like.tokens.scored import scored_row, step_places

SCORE, OWN = "reward_model", "environment"


def rows_to_score(episodes: Sequence[Episode], enders: Set[int] | None) -> TokenBatch | None:
    """A row of each valid episode, in order: the whole conversation as its last segment has it; None if no episode is valid.

    Scores are read after its last token, or with `enders`, the tokens that end a step, after every step.
    """
    rows = []
    prompts: dict[tuple[int, ...], int] = {}
    for index, episode in enumerate(episodes):
        if episode.invalid is not None:
            continue
        segment = episode.segments[-1]
        last = len(segment.tokens) - 1
        places = [last] if enders is None else step_places(segment.tokens, segment.sampled, enders)
        prompt = segment.tokens[: segment.prompt_len]
        rows.append(
            scored_row(
                segment.tokens,
                places,
                prompt_len=segment.prompt_len,
                prompt_id=prompts.setdefault(prompt, len(prompts)),
                group_id=index,
                episode_id=index,
            )
        )
    return batch_rows(rows) if rows else None


def scores_of(rows: TokenBatch, values: Sequence[Tensor], spec: RewardModelSpec) -> dict[int, float]:
    """Score by index of the episode, from what each model gives at the rows' scored places, float32 [N] each."""
    members = torch.stack([_of_rows(rows, one.double(), spec.process) for one in values])
    return dict(zip(rows.episode_id.tolist(), combined(members, spec).tolist(), strict=True))


def combined(members: Tensor, spec: RewardModelSpec) -> Tensor:
    """[B] the ensemble's score from those of its members, [models, B].

    Mean, worst case, or mean - weight * variance (over the members): Coste et al. 2023 (arXiv 2310.02743), section 3.
    """
    if spec.combine == "min":
        return members.amin(dim=0)
    mean = members.mean(dim=0)
    if spec.combine == "mean_minus_variance":
        return mean - spec.variance_weight * members.var(dim=0, correction=0)
    return mean


def _of_rows(rows: TokenBatch, values: Tensor, process: ProcessScores | None) -> Tensor:
    """[B] the score of each row, from those of its steps where there are any."""
    parts = [
        row[mask] for row, mask in zip(*(x.split(rows.lengths.tolist()) for x in (values, rows.loss_mask)), strict=True)
    ]
    if process is None:
        return torch.cat(parts)
    return torch.stack([_over_steps(part.sigmoid(), process.over_steps) for part in parts])


def _over_steps(probabilities: Tensor, how: str) -> Tensor:
    """Scalar from [steps]."""
    if how == "min":
        return probabilities.amin()
    if how == "mean":
        return probabilities.mean()
    return probabilities.prod() if how == "product" else probabilities[-1]


def judged(
    episodes: Sequence[Episode], scores: Mapping[int, float], spec: RewardModelSpec, scored: bool
) -> list[Episode]:
    """The episodes with environment_weight * own reward + weight * score; those without a score stay as they are.

    The score falls on the last token. `scored`: the environment has a reward of its own, which becomes a part beside the score.
    """
    return [
        _judged(episode, scores[index], spec, scored) if index in scores else episode
        for index, episode in enumerate(episodes)
    ]


def _judged(episode: Episode, score: float, spec: RewardModelSpec, scored: bool) -> Episode:
    own = episode.rewards or ({OWN: episode.reward} if scored else {})
    share = spec.environment_weight
    segments = tuple(replace(s, rewards=tuple(share * reward for reward in s.rewards)) for s in episode.segments)
    return replace(
        episode,
        reward=share * episode.reward + spec.weight * score,
        rewards={**own, SCORE: score},
        segments=segments,
    )
