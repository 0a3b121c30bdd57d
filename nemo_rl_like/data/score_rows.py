"""Examples of a reward model to rows: the score is read at the last token that the assistant writes, or at the end of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import Message
from nemo_rl_like.data.preferences import Pair
from nemo_rl_like.data.ratings import Rated, Stepwise
from nemo_rl_like.data.render import Renderer, TrainedText
from nemo_rl_like.data.trained_rows import RowCollector, TooLong, TrainedRows, texts_of
from nemo_rl_like.tokens.batch import Row
from nemo_rl_like.tokens.scored import scored_row, step_places


def pair_score_rows(
    pairs: Sequence[Pair], renderer: Renderer, *, max_tokens: int, too_long: TooLong = "drop"
) -> TrainedRows:
    """Two rows of each pair with one score each: `group_id` is the pair, the columns are `chosen` and, where given, `margin`.

    A pair with a side that is too long or has no assistant message is left out whole.
    Raises InputError: a row is too long and `too_long` is `refuse`; or the template does not fit.
    """
    made = _collector(max_tokens, too_long)
    for index, pair in enumerate(pairs):
        sides = [_scored((*pair.prompt, *side), renderer, len(pair.prompt)) for side in (pair.chosen, pair.rejected)]
        if not made.takes(sides, pair.where):
            continue
        margin = {} if pair.margin is None else {"margin": pair.margin}
        for side, (text,) in enumerate(sides):
            columns = {"chosen": float(side == 0), **margin}
            made.add(_row(text, group_id=index, episode_id=2 * index + side, columns=columns))
    return made.done()


def rated_rows(
    examples: Sequence[Rated], renderer: Renderer, *, max_tokens: int, too_long: TooLong = "drop"
) -> TrainedRows:
    """A row of each completion with its rating in the extra `target`. Raises as `pair_score_rows`."""
    made = _collector(max_tokens, too_long)
    for index, example in enumerate(examples):
        side = _scored((*example.prompt, *example.completion), renderer, len(example.prompt))
        if made.takes([side], example.where):
            made.add(_row(side[0], group_id=index, episode_id=index, targets=(example.score,)))
    return made.done()


def stepwise_rows(
    examples: Sequence[Stepwise],
    renderer: Renderer,
    *,
    separator: str,
    max_tokens: int,
    too_long: TooLong = "drop",
) -> TrainedRows:
    """A row of each solution, scored at the end of each step, with the labels in the extra `target`.

    Raises InputError as `pair_score_rows`, and if the tokenizer puts the separator and what follows it into one token.
    """
    made = _collector(max_tokens, too_long)
    enders = renderer.ids_ending_with(separator)
    for index, example in enumerate(examples):
        side = _scored((*example.prompt, *example.completion(separator)), renderer, len(example.prompt))
        if made.takes([side], example.where):
            places = _step_places(side[0], example, enders, separator)
            made.add(_row(side[0], group_id=index, episode_id=index, places=places, targets=example.labels))
    return made.done()


def _step_places(text: TrainedText, example: Stepwise, enders: Set[int], separator: str) -> list[int]:
    places = step_places(text.ids, text.mask, enders)
    if len(places) != len(example.labels):
        raise InputError(
            f"{example.where}: the tokenizer shows {len(places)} ends of steps where {len(example.labels)} are; it joins the separator "
            f"{separator!r} with what follows it, so set another `loss.separator`"
        )
    return places


def _collector(max_tokens: int, too_long: TooLong) -> RowCollector:
    """A row has one token more than its text: the place behind its end."""
    return RowCollector(max_tokens - 1, too_long)


def _scored(messages: Sequence[Message], renderer: Renderer, first: int) -> list[TrainedText]:
    """The conversation up to the last token that the assistant writes, as a rollout would have ended it; nothing without one."""
    texts = texts_of(messages, renderer, first)
    if not texts:
        return []
    whole = texts[-1]
    end = len(whole.mask) - whole.mask[::-1].index(True)
    return [TrainedText(whole.ids[:end], whole.mask[:end], whole.weights[:end])]


def _row(
    text: TrainedText,
    *,
    group_id: int,
    episode_id: int,
    places: Sequence[int] | None = None,
    targets: Sequence[float] | None = None,
    columns: Mapping[str, float] | None = None,
) -> Row:
    """The row of one text, scored at its end unless `places` are given."""
    return scored_row(
        text.ids,
        places if places is not None else (len(text.ids) - 1,),
        prompt_len=text.mask.index(True),
        prompt_id=0,
        group_id=group_id,
        episode_id=episode_id,
        targets=targets,
        columns=columns,
    )
