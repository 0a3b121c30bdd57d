"""Conversations to rows with the assistant's tokens trained."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_like.data.messages import Message, WeightedMessage
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.trained_rows import TooLong, TrainedRows, fits, row_of, texts_of
from nemo_rl_like.tokens.batch import Row


def sft_rows(
    conversations: Sequence[Sequence[Message]],
    renderer: Renderer,
    *,
    max_tokens: int,
    too_long: TooLong = "drop",
) -> TrainedRows:
    """Rows of at most `max_tokens` tokens; nothing is ever cut. `episode_id` is the conversation's index.

    Where a message has a weight, every row has the extra `weight`.

    Raises:
        InputError: a row is too long and `too_long` is `refuse`; or the template does not fit (see `Renderer.trained_texts`).
    """
    weighted = any(isinstance(m, WeightedMessage) for messages in conversations for m in messages)
    rows: list[Row] = []
    untrained = long = 0
    for index, messages in enumerate(conversations):
        texts = texts_of(messages, renderer)
        untrained += not texts
        for text in texts:
            if fits(text, max_tokens, too_long, f"conversation {index}"):
                rows.append(row_of(text, prompt_id=len(rows), group_id=index, episode_id=index, weighted=weighted))
            else:
                long += 1
    return TrainedRows(rows=tuple(rows), dropped_untrained=untrained, dropped_too_long=long)
