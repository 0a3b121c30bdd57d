"""Laws of the functional probe."""

from __future__ import annotations

import math

import pytest

from nemo_rl_like.generation.probe import check_gap, probe_gap, probe_prompts
from nemo_rl_like.weights.errors import WeightSyncError


def test_quantiles_are_those_of_the_absolute_gaps() -> None:
    engine = [[-1.0] * 60, [-2.0] * 40]
    trainer = [[-1.0] * 60, [-2.5] * 39 + [-5.0]]
    report = probe_gap(engine, trainer)
    assert (report.p50, report.p99, report.max, report.tokens) == (0.0, 3.0, 3.0, 100)


def test_a_gap_above_the_limit_is_told_with_both_numbers() -> None:
    report = probe_gap([[-1.0]], [[-1.25]])
    check_gap(report, 0.25, "probe")
    with pytest.raises(WeightSyncError, match=r"probe at version 3: .*p99 0.25 nats.*limit 0.001"):
        check_gap(report, 1e-3, "probe at version 3")


def test_nan_is_an_infinite_gap() -> None:
    assert probe_gap([[math.nan, 0.0]], [[0.0, 0.0]]).max == math.inf
    assert probe_gap([[-math.inf]], [[-math.inf]]).max == math.inf


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1\].*\[2\]"):
        probe_gap([[0.0]], [[0.0, 0.0]])


def test_probe_prompts_are_fixed_and_inside_the_vocabulary() -> None:
    prompts = probe_prompts(17, count=8, tokens=64)
    assert prompts == probe_prompts(17, count=8, tokens=64) != probe_prompts(17, count=8, tokens=64, seed=1)
    assert len(prompts) == 8 and {len(p) for p in prompts} == {64}
    assert {t for p in prompts for t in p} == set(range(17))
