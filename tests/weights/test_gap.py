"""Laws of the quantiles by which an engine and its trainer are compared."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.weights.gap import gap_quantiles


@settings(deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=300))
def test_quantiles_are_values_of_the_sorted_gaps_in_any_order(steps: list[int]) -> None:
    trainer = torch.tensor(steps, dtype=torch.float64) / 64
    engine = torch.zeros_like(trainer)
    ordered = sorted(abs(step) / 64 for step in steps)
    at = lambda q: ordered[min(len(ordered) - 1, math.floor(q * len(ordered)))]
    assert gap_quantiles(engine, trainer).tolist() == [at(0.5), at(0.99), ordered[-1]]
    shuffled = trainer[torch.randperm(len(steps))]
    assert torch.equal(gap_quantiles(engine, shuffled), gap_quantiles(trainer, engine))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_infinite_gap_on_either_side(bad: float) -> None:
    whole, broken = torch.zeros(200), torch.zeros(200)
    broken[:3] = bad
    for sides in ((whole, broken), (broken, whole), (broken, broken)):
        assert gap_quantiles(*sides).tolist() == [0.0, math.inf, math.inf]


def test_no_tokens_have_no_gap() -> None:
    assert gap_quantiles(torch.zeros(0), torch.zeros(0)).tolist() == [0.0, 0.0, 0.0]
