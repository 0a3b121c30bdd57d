"""Advantages against the worked values and a float64 loop reference."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.algorithms.advantages import EPS, ESTIMATORS, GROUP_RELATIVE, estimate


def reference(name, rewards, groups, valid):
    """The equation by loops in float64."""
    alive = [r for r, v in zip(rewards, valid, strict=True) if v]
    batch_std = statistics.stdev(alive) if len(alive) > 1 else 0.0
    out = []
    for i, reward in enumerate(rewards):
        mates = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]]
        if not valid[i]:
            out.append(0.0)
        elif name == "reinforce":
            out.append(reward)
        elif len(mates) < 2 or max(mates) == min(mates):
            out.append(0.0)
        else:
            centered = reward - math.fsum(mates) / len(mates)
            out.append(
                {
                    "grpo": lambda c=centered, m=mates: c / (statistics.stdev(m) + EPS),
                    "dr_grpo": lambda c=centered: c,
                    "batch_std": lambda c=centered: c / (batch_std + EPS),
                    "rloo": lambda m=mates, r=reward: r - (math.fsum(m) - r) / (len(m) - 1),
                }[name]()
            )
    return out


@st.composite
def episodes(draw):
    count = draw(st.integers(1, 24))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, -1.0, 0.125]), min_size=count, max_size=count))
    groups = draw(st.lists(st.integers(5, 9), min_size=count, max_size=count))
    valid = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return rewards, groups, valid


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=80, deadline=None)
@given(data=episodes())
def test_advantage_equals_the_loop_reference(name, data):
    rewards, groups, valid = data
    as_float32 = torch.tensor(rewards)
    got = estimate(name, as_float32, torch.tensor(groups), torch.tensor(valid))
    want = reference(name, as_float32.double().tolist(), groups, valid)
    torch.testing.assert_close(got.double(), torch.tensor(want).double(), atol=1e-6, rtol=1e-5)


def test_worked_values():
    one_of_four = (torch.tensor([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))
    for name, want in {"grpo": [1.5, -0.5], "rloo": [1.0, -1 / 3], "dr_grpo": [0.75, -0.25]}.items():
        got = estimate(name, *one_of_four)
        torch.testing.assert_close(got[:2], torch.tensor(want), atol=1e-5, rtol=0)


def test_a_lone_success_in_eight_is_about_2_47():
    rewards = torch.tensor([1.0] + [0.0] * 7)
    got = estimate("grpo", rewards, torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.bool))
    assert got[0] == pytest.approx(2.4749, abs=1e-3)


@pytest.mark.parametrize("name", sorted(GROUP_RELATIVE))
def test_zero_spread_and_singleton_groups_are_exactly_zero(name):
    rewards = torch.tensor([0.3] * 7 + [1.0])
    got = estimate(name, rewards, torch.tensor([0] * 7 + [1]), torch.ones(8, dtype=torch.bool))
    assert got.tolist() == [0.0] * 8


def test_an_invalid_sample_with_nan_reward_moves_nothing():
    valid = torch.tensor([True, True, True, False])
    groups = torch.zeros(4, dtype=torch.int64)
    with_nan = estimate("grpo", torch.tensor([1.0, 0.0, 0.5, float("nan")]), groups, valid)
    without = estimate("grpo", torch.tensor([1.0, 0.0, 0.5]), groups[:3], valid[:3])
    assert with_nan.tolist() == [*without.tolist(), 0.0]


def test_equal_prompts_in_different_groups_stay_apart():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    got = estimate("dr_grpo", rewards, torch.tensor([7, 7, 3, 3]), torch.ones(4, dtype=torch.bool))
    assert got.tolist() == [0.5, -0.5, 0.0, 0.0]
