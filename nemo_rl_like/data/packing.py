"""Packed text: documents laid end to end in an order of each epoch's own, and cut into rows of equal length.

Every token of an epoch is in exactly one row. A row that several documents share is one piece, or a piece for each document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nemo_rl_like.data.order import ShuffledOrder
from nemo_rl_like.tokens.batch import Row


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of packed text."""

    pieces: tuple[tuple[int, ...], ...]
    """Token ids of each document's part, in order."""

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.pieces))


class PackedDocuments:
    """Documents of token ids as packed rows; row `i` of epoch `e` is a function of (seed, e, i)."""

    def __init__(self, documents: Sequence[Sequence[int]], sequence_tokens: int, seed: int | None) -> None:
        """`seed` of the order of documents; None: as they stand, in every epoch. Every document has at least one token."""
        self._documents = documents
        self._length = sequence_tokens
        self._order = None if seed is None else ShuffledOrder(len(documents), seed)
        total = sum(map(len, documents))
        self.rows = -(-total // sequence_tokens)
        """Rows of an epoch; the last one may be shorter."""
        self._epoch = -1
        self._indices: list[int] = []
        self._ends: list[int] = []

    def row(self, index: int, epoch: int) -> PackedRow:
        """Row `index` of `rows` in an epoch."""
        self._lay(epoch)
        start, stop = index * self._length, min((index + 1) * self._length, self._ends[-1])
        pieces: list[tuple[int, ...]] = []
        place = bisect_right(self._ends, start)
        while start < stop:
            document, end = self._documents[self._indices[place]], self._ends[place]
            offset = start - (end - len(document))
            taken = min(stop, end) - start
            pieces.append(tuple(document[offset : offset + taken]))
            start += taken
            place += 1
        return PackedRow(tuple(pieces))

    def _lay(self, epoch: int) -> None:
        """Where each document ends in the epoch's stream."""
        if epoch == self._epoch:
            return
        count = len(self._documents)
        if self._order is None:
            self._indices = list(range(count))
        else:
            self._indices = [draw.index for draw in self._order.draws(epoch * count, count)]
        self._ends = list(accumulate(len(self._documents[i]) for i in self._indices))
        self._epoch = epoch


def piece_rows(packed: Sequence[PackedRow], *, attend_across_documents: bool) -> list[Row]:
    """Batch rows in which every token but each piece's first is trained; pieces of one token are left out.

    With `attend_across_documents` a packed row is one piece. `group_id` and `episode_id` are the packed row's index.
    """
    rows: list[Row] = []
    for index, one in enumerate(packed):
        whole = (tuple(token for piece in one.pieces for token in piece),)
        for piece in whole if attend_across_documents else one.pieces:
            if len(piece) > 1:
                rows.append(_row(piece, prompt_id=len(rows), index=index))
    return rows


def _row(ids: tuple[int, ...], *, prompt_id: int, index: int) -> Row:
    count = len(ids)
    return Row(
        tokens=ids,
        prompt_len=1,
        loss_mask=(False,) + (True,) * (count - 1),
        behavior=(0.0,) * count,
        version=(-1,) * count,
        prompt_id=prompt_id,
        group_id=index,
        episode_id=index,
    )
