"""Laws of packed text: every token of an epoch once, whatever the order and the length of rows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.data.order import ShuffledOrder
from nemo_rl_like.data.packing import PackedDocuments, PackedRow, piece_rows
from nemo_rl_like.tokens.batch import batch_rows

DOCUMENTS = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(
    lambda lengths: [[100 * i + j for j in range(n)] for i, n in enumerate(lengths)]
)


def walked(documents: list[list[int]], order: list[int], length: int) -> list[list[list[int]]]:
    """Rows of pieces, token by token: a new row when one is full, a new piece at each document's start."""
    rows: list[list[list[int]]] = []
    room = 0
    for index in order:
        fresh = True
        for token in documents[index]:
            if room == 0:
                rows.append([])
                room, fresh = length, True
            if fresh:
                rows[-1].append([])
            rows[-1][-1].append(token)
            room, fresh = room - 1, False
    return rows


@settings(deadline=None)
@given(DOCUMENTS, st.integers(2, 7), st.sampled_from([None, 1, 2]), st.integers(0, 2))
def test_rows_are_the_documents_walked_token_by_token(
    documents: list[list[int]], length: int, seed: int | None, epoch: int
) -> None:
    packed = PackedDocuments(documents, length, seed)
    order = list(range(len(documents)))
    if seed is not None:
        draws = ShuffledOrder(len(documents), seed).draws(epoch * len(documents), len(documents))
        order = [draw.index for draw in draws]
    want = walked(documents, order, length)
    assert packed.rows == len(want)
    # Read backwards and in another epoch between: a row depends on nothing but its place.
    for index in reversed(range(packed.rows)):
        packed.row(0, epoch + 1)
        assert [list(piece) for piece in packed.row(index, epoch).pieces] == want[index]


@settings(deadline=None)
@given(DOCUMENTS, st.integers(2, 7), st.booleans())
def test_every_token_but_the_first_of_each_piece_is_trained(
    documents: list[list[int]], length: int, across: bool
) -> None:
    packed = PackedDocuments(documents, length, 3)
    rows = [packed.row(i, 0) for i in range(packed.rows)]
    pieces = [sum(row.pieces, ()) for row in rows] if across else [piece for row in rows for piece in row.pieces]
    made = piece_rows(rows, attend_across_documents=across)
    assert [tuple(row.tokens) for row in made] == [piece for piece in pieces if len(piece) > 1]
    if made:
        batch = batch_rows(made)
        assert int(batch.loss_mask.sum()) == sum(len(piece) - 1 for piece in pieces)
        assert batch.prompt_id.unique().numel() == batch.rows


def test_documents_are_apart_unless_asked_for() -> None:
    row = PackedRow(((1, 2, 3), (4, 5)))
    assert [r.tokens for r in piece_rows([row], attend_across_documents=False)] == [(1, 2, 3), (4, 5)]
    (whole,) = piece_rows([row], attend_across_documents=True)
    assert whole.tokens == (1, 2, 3, 4, 5) and whole.loss_mask == (False, True, True, True, True)
