"""Rows of rendered texts. Masks come from spans, never from ids: pad may equal the end token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True)
class RowCollector:
    """Rows of examples that are taken whole or not at all; those of equal prompt tokens share a prompt id."""

    max_tokens: int
    """Longest text, in tokens."""
    too_long: TooLong
    rows: list[Row] = field(default_factory=list)
    untrained: int = 0
    """Examples without a token to train, so far."""
    long: int = 0
    """Examples with a text that is too long, so far."""
    _prompts: dict[tuple[int, ...], int] = field(default_factory=dict)

    def takes(self, sides: Sequence[Sequence[TrainedText]], where: str) -> bool:
        """Whether an example with these texts on each of its sides can be trained; counts it if not. Raises InputError as `fits`."""
        if not all(sides):
            self.untrained += 1
            return False
        texts = [text for side in sides for text in side]
        if not all(fits(text, self.max_tokens, self.too_long, f"{where}: the conversation") for text in texts):
            self.long += 1
            return False
        return True

    def add(self, row: Row) -> None:
        """Keep a row, with the number of its prompt."""
        prompt_id = self._prompts.setdefault(tuple(row.tokens[: row.prompt_len]), len(self._prompts))
        self.rows.append(replace(row, prompt_id=prompt_id))

    def done(self) -> TrainedRows:
        """What was made of the examples."""
        return TrainedRows(tuple(self.rows), self.untrained, self.long)
