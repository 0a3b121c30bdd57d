"""Conversations to rows with the assistant's tokens trained. Masks come from spans, never from ids: pad may equal the end token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import Message
from nemo_rl_like.data.render import Renderer, TrainedText
from nemo_rl_like.tokens.batch import Row


@dataclass(frozen=True, slots=True)
class SftRows:
    """Rows and what was left out."""

    rows: tuple[Row, ...]
    """In the order of the conversations; `episode_id` is the conversation's index."""
    dropped_untrained: int = 0
    """Conversations without a token to train."""
    dropped_too_long: int = 0
    """Rows longer than the limit."""


def sft_rows(
    conversations: Sequence[Sequence[Message]],
    renderer: Renderer,
    *,
    max_tokens: int,
    too_long: Literal["drop", "refuse"] = "drop",
) -> SftRows:
    """Rows of at most `max_tokens` tokens; nothing is ever cut.

    Raises:
        InputError: a row is too long and `too_long` is `refuse`; or the template does not fit (see `Renderer.trained_texts`).
    """
    rows: list[Row] = []
    untrained = long = 0
    for index, messages in enumerate(conversations):
        texts = [text for text in renderer.trained_texts(messages) if any(text.mask[1:])]
        untrained += not texts
        for text in texts:
            if len(text.ids) <= max_tokens:
                rows.append(_row(text, prompt_id=len(rows), episode_id=index))
                continue
            if too_long == "refuse":
                raise InputError(
                    f"conversation {index} has {len(text.ids)} tokens, more than the context of {max_tokens}; shorten or remove it"
                )
            long += 1
    return SftRows(rows=tuple(rows), dropped_untrained=untrained, dropped_too_long=long)


def _row(text: TrainedText, *, prompt_id: int, episode_id: int) -> Row:
    # No token predicts the first one, so it is never trained.
    mask = (False, *text.mask[1:])
    count = len(text.ids)
    return Row(
        tokens=text.ids,
        prompt_len=mask.index(True),
        loss_mask=mask,
        behavior=(0.0,) * count,
        version=(-1,) * count,
        prompt_id=prompt_id,
        group_id=episode_id,
        episode_id=episode_id,
    )
