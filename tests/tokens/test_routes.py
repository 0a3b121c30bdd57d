"""Records of experts: what is cut, joined and completed is what a list of numbers would be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.tokens.batch import Row, batch_rows, concat
from nemo_rl_like.tokens.routes import ROUTES, TokenRoutes

WIDTH = 3
ONE = st.lists(st.integers(1, 300), min_size=WIDTH, max_size=WIDTH) | st.just([0] * WIDTH)
RECORD = st.lists(ONE, max_size=6)


def routes(numbers: list[list[int]]) -> TokenRoutes:
    return TokenRoutes.of(torch.tensor(numbers, dtype=torch.int16).view(-1, WIDTH))


@given(RECORD, RECORD, st.integers(0, 6))
def test_records_are_cut_joined_and_padded_as_lists_are(
    first: list[list[int]], second: list[list[int]], n: int
) -> None:
    one = routes(first)
    assert (one + routes(second)).tensor().tolist() == first + second
    assert one.first(n).tensor().tolist() == first[:n]
    assert one.padded(8).tensor().tolist() == first + [[0] * WIDTH] * (8 - len(first))
    assert one.tokens == len(first)


@given(RECORD, st.lists(ONE, min_size=6, max_size=8))
def test_the_first_record_of_a_token_stays_and_later_ones_fill_the_gaps(
    early: list[list[int]], late: list[list[int]]
) -> None:
    expected = [early[i] if i < len(early) and any(early[i]) else late[i] for i in range(len(late))]
    assert routes(early).completed(routes(late)).tensor().tolist() == expected


def row(record: list[list[int]] | None, tokens: int = 3) -> Row:
    told = None if record is None else routes(record)
    return Row([1] * tokens, 1, [False] * tokens, [0.0] * tokens, [-1] * tokens, 0, 0, 0, routes=told)


def test_a_batch_has_the_records_of_its_rows_and_none_for_rows_that_were_never_answered() -> None:
    record = [[1, 2, 3], [4, 5, 6], [0, 0, 0]]
    batch = batch_rows([row(None), row(record)])
    assert batch.extras[ROUTES].dtype == torch.int16
    assert batch.extras[ROUTES].tolist() == [[0] * WIDTH] * 3 + record
    assert batch.select([1]).extras[ROUTES].tolist() == record
    assert ROUTES not in batch_rows([row(None)]).extras
    joined = concat([batch_rows([row(None, 2)]), batch])
    assert joined.extras[ROUTES].tolist() == [[0] * WIDTH] * 5 + record


def test_records_of_other_models_or_lengths_do_not_mix() -> None:
    with pytest.raises(ValueError, match="different models"):
        routes([[1, 2, 3]]) + TokenRoutes.none(4, 1)
    with pytest.raises(ValueError, match="row 0: routes has 2 entries for 3 tokens"):
        batch_rows([row([[1, 2, 3], [4, 5, 6]])])
