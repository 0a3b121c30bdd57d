"""Laws of the content split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.data.content_split import content_hash, split_by_content


@given(
    operands=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=20, max_size=200, unique=True),
    seed=st.integers(0, 1000),
)
def test_sides_are_disjoint_by_content_and_lose_nothing(operands, seed):
    distinct = len({tuple(sorted(pair)) for pair in operands})
    held = max(1, distinct // 5)
    try:
        splits = split_by_content(operands, lambda p: str(sorted(p)), validation=held, test=held, seed=seed)
    except SpecError as error:
        assert "belong together" in str(error) or "ask for" in str(error)
        return
    sides = [{tuple(sorted(p)) for p in side} for side in (splits.train, splits.validation, splits.test)]
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
    assert sorted([*splits.train, *splits.validation, *splits.test]) == sorted(operands)
    assert (len(splits.validation), len(splits.test)) == (held, held)


@given(order=st.permutations(range(40)))
def test_the_side_of_an_item_does_not_depend_on_the_order_of_items(order):
    split = split_by_content(order, str, validation=5, test=7, seed=3)
    again = split_by_content(sorted(order), str, validation=5, test=7, seed=3)
    assert [set(split.named(s)) for s in ("train", "validation", "test")] == [
        set(again.named(s)) for s in ("train", "validation", "test")
    ]


def test_another_seed_holds_out_other_items():
    first = split_by_content(range(100), str, validation=0, test=20, seed=0)
    other = split_by_content(range(100), str, validation=0, test=20, seed=1)
    assert set(first.test) != set(other.test)


def test_asking_for_more_than_there_is_names_the_numbers():
    with pytest.raises(SpecError, match=r"ask for 12 .* there are 10"):
        split_by_content(range(10), str, validation=1, test=10, seed=0)


def test_a_size_that_whole_groups_cannot_make_is_refused():
    with pytest.raises(SpecError, match=r"test split asks for 3 .* ask for 2"):
        split_by_content(range(10), lambda i: str(i // 2), validation=0, test=3, seed=0)


def test_content_hash_is_the_same_in_every_version():
    assert content_hash("a", "b") != content_hash("ab")
    assert content_hash("pinned") == 13592486772525405100
