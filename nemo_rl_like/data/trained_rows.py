"""Rows of rendered texts. Masks come from spans, never from ids: pad may equal the end token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import Message
from nemo_rl_like.data.render import Renderer, TrainedText
from nemo_rl_like.tokens.batch import Row

TooLong = Literal["drop", "refuse"]


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Rows and what was left out."""

    rows: tuple[Row, ...]
    """In the order of the examples."""
    dropped_untrained: int = 0
    """Examples without a token to train."""
    dropped_too_long: int = 0
    """Examples (supervised: rows) longer than the limit."""


def texts_of(messages: Sequence[Message], renderer: Renderer, first: int = 0) -> list[TrainedText]:
    """The texts that train assistant messages from number `first` on; those without a token to train are left out.

    Raises InputError when the template does not fit (see `Renderer.trained_texts`).
    """
    return [text for text in renderer.trained_texts(messages, first=first) if any(text.mask[1:])]


def fits(text: TrainedText, max_tokens: int, too_long: TooLong, what: str) -> bool:
    """Whether the text has at most `max_tokens` tokens; nothing is ever cut. Raises InputError if it has not and must."""
    if len(text.ids) <= max_tokens:
        return True
    if too_long == "refuse":
        raise InputError(
            f"{what} has {len(text.ids)} tokens, more than the context of {max_tokens}; shorten or remove it"
        )
    return False


def row_of(
    text: TrainedText,
    *,
    prompt_id: int,
    group_id: int,
    episode_id: int,
    columns: Mapping[str, float] | None = None,
    weighted: bool = False,
) -> Row:
    """One row; no engine sampled it. `weighted`: with its tokens' weights as the extra `weight`."""
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
        group_id=group_id,
        episode_id=episode_id,
        columns=columns or {},
        extras={"weight": text.weights} if weighted else {},
    )
