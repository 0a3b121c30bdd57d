"""Pairs of fresh samples, chosen by their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl_like.rollout.episode import Episode, episode_rows
from nemo_rl_like.tokens.batch import Row


def best_and_worst(episodes: Sequence[Episode]) -> list[tuple[Episode, Episode]]:
    """Of each group the valid samples of highest and lowest reward, the earlier one of equals; none where all are equal."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        if episode.invalid is None:
            groups.setdefault(episode.group_id, []).append(episode)
    found = [(max(g, key=lambda e: e.reward), min(g, key=lambda e: e.reward)) for g in groups.values()]
    return [(best, worst) for best, worst in found if best.reward > worst.reward]


def against(episodes: Sequence[Episode], opponents: Sequence[Episode]) -> list[tuple[Episode, Episode]]:
    """Each sample with the opponent's, the better one first; none where one is invalid or both are equally good."""
    both = zip(episodes, opponents, strict=True)
    valid = [(a, b) for a, b in both if a.invalid is None and b.invalid is None and a.reward != b.reward]
    return [(a, b) if a.reward > b.reward else (b, a) for a, b in valid]


def pair_rows(pairs: Sequence[tuple[Episode, Episode]], opponents: Sequence[Episode] = ()) -> list[Row]:
    """The rows of both episodes of each pair; `group_id` is the pair.

    The columns are `chosen`, `margin` (difference of the rewards), and `explored` on what the opponent sampled.
    """
    theirs = {id(episode) for episode in opponents}
    rows: list[Row] = []
    for number, (better, worse) in enumerate(pairs):
        margin = better.reward - worse.reward
        for side, episode in enumerate((better, worse)):
            columns = {"chosen": float(side == 0), "margin": margin, "explored": float(id(episode) in theirs)}
            made = episode_rows([replace(episode, id=2 * number + side, group_id=number)])
            rows += [replace(row, columns=columns, extras={}) for row in made]
    return _with_shared_prompts(rows)


def _with_shared_prompts(rows: Sequence[Row]) -> list[Row]:
    """The rows with one prompt id for equal prompt tokens."""
    known: dict[tuple[int, ...], int] = {}
    return [replace(row, prompt_id=known.setdefault(tuple(row.tokens[: row.prompt_len]), len(known))) for row in rows]
