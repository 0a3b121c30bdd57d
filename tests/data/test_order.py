"""Laws of the data order: resume anywhere and see the same examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.order import DataPosition, ShuffledOrder, check_resumes


@given(size=st.integers(1, 40), seed=st.integers(0, 99), cut=st.integers(0, 120), more=st.integers(0, 60))
def test_resuming_at_any_position_gives_the_draws_of_the_uncut_run(size, seed, cut, more):
    whole = ShuffledOrder(size, seed).draws(0, cut + more)
    assert ShuffledOrder(size, seed).draws(cut, more) == whole[cut:]


@given(size=st.integers(1, 40), seed=st.integers(0, 99))
def test_every_epoch_visits_every_example_once(size, seed):
    order = ShuffledOrder(size, seed)
    for epoch in range(3):
        draws = order.draws(epoch * size, size)
        assert sorted(draw.index for draw in draws) == list(range(size))
        assert {draw.epoch for draw in draws} == {epoch}


def test_epochs_and_seeds_are_shuffled_differently():
    order = ShuffledOrder(50, 1)
    first = [draw.index for draw in order.draws(0, 50)]
    assert first != [draw.index for draw in order.draws(50, 50)]
    assert first != [draw.index for draw in ShuffledOrder(50, 2).draws(0, 50)]
    assert first != list(range(50))


def test_a_position_of_another_dataset_is_refused():
    position = DataPosition("a" * 64).advance(7)
    check_resumes(position, "a" * 64, "data.jsonl")
    with pytest.raises(InputError, match=r"data\.jsonl: .* example 7 .* aaaaaaaaaaaa, .* bbbbbbbbbbbb"):
        check_resumes(position, "b" * 64, "data.jsonl")
