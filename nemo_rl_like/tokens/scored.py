"""Rows for a model with a score head: which places it is read at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from nemo_rl_like.tokens.batch import Row


def scored_row(
    tokens: Sequence[int],
    places: Sequence[int],
    *,
    prompt_len: int,
    prompt_id: int,
    group_id: int,
    episode_id: int,
    targets: Sequence[float] | None = None,
    columns: Mapping[str, float] | None = None,
) -> Row:
    """The row of `tokens` whose scores are read at the states after `places`, each below len(tokens).

    As a head is read where it predicts a token, the loss mask stands one token behind each place, and one more token ends the row.
    `targets`: [places] what each score should be, in the extra `target`.
    """
    count = len(tokens) + 1
    behind = {place + 1: i for i, place in enumerate(places)}
    mask = [i in behind for i in range(count)]
    extras = {} if targets is None else {"target": [targets[behind[i]] if i in behind else 0.0 for i in range(count)]}
    return Row(
        tokens=(*tokens, tokens[-1]),
        prompt_len=prompt_len,
        loss_mask=mask,
        behavior=(0.0,) * count,
        version=(-1,) * count,
        prompt_id=prompt_id,
        group_id=group_id,
        episode_id=episode_id,
        columns=columns or {},
        extras=extras,
    )


def step_places(tokens: Sequence[int], written: Sequence[bool], enders: Set[int]) -> list[int]:
    """Where the steps of a response end: `written` tokens that are in `enders`, and the last token of the row."""
    last = len(tokens) - 1
    return [i for i in range(last) if written[i] and tokens[i] in enders] + [last]
