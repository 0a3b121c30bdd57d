"""Advantage estimators against worked values and the oracle, on rewards that hypothesis finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from nemo_rl_like.algorithms.advantages import BY_EPISODE, BY_TOKEN, estimate
from nemo_rl_like.algorithms.episodes import Episodes, Groups
from nemo_rl_like.spec.advantages import GROUP_RELATIVE, AdvantageSpec
from nemo_rl_like.spec.algorithm import AlgorithmSpec

from . import cells
from .oracle.advantages import advantages as oracle
from .oracle.samples import Sample, Tok

WITHOUT_CRITIC = sorted((set(BY_EPISODE) | set(BY_TOKEN)) - {"gae", "vapo"})


def block(kind: str, **numbers: Any) -> Any:
    """An advantage block."""
    return TypeAdapter(AdvantageSpec).validate_python({"kind": kind, **numbers})


def episodes_of(rewards: list[float], groups: list[int], valid: list[bool] | None = None) -> Episodes:
    """One-token episodes, each a turn of its own; an invalid one has no trained token."""
    alive = torch.tensor(valid if valid is not None else [True] * len(rewards))
    places = alive.nonzero()[:, 0]
    values = torch.where(alive, torch.tensor(rewards, dtype=torch.float64), torch.nan)
    return Episodes(
        groups=Groups.of(torch.tensor(groups), alive),
        rewards=values,
        place=places,
        episode=places,
        lengths=alive.long(),
        parts={"correct": values},
        greedy=torch.zeros_like(values),
        turn=torch.zeros_like(places),
        anchor=torch.zeros_like(places),
    )


def of_episodes(options: Any, episodes: Episodes) -> list[float]:
    """The advantage of each episode, 0 for those without a token."""
    out = torch.zeros(episodes.count, dtype=torch.float64)
    out[episodes.episode] = estimate(options, episodes).advantages
    return [float(x) for x in out]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[float], list[int], list[bool]]:
    """Rewards, groups and validity of up to 24 episodes."""
    count = draw(st.integers(1, 24))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, 2.0, 0.125]), min_size=count, max_size=count))
    groups = draw(st.lists(st.integers(5, 9), min_size=count, max_size=count))
    valid = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return rewards, groups, valid


@pytest.mark.parametrize("kind", WITHOUT_CRITIC)
@settings(max_examples=60, deadline=None)
@given(data=steps())
def test_an_estimator_equals_the_oracle(kind: str, data: tuple[list[float], list[int], list[bool]]) -> None:
    rewards, groups, valid = data
    numbers = cells.BITING.get(kind, {})
    samples = [
        Sample(g, v, r, {"correct": r}, 0.0, False, 0.0, 9, [Tok(v, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)])
        for r, g, v in zip(rewards, groups, valid, strict=True)
    ]
    algorithm = AlgorithmSpec.model_validate({"advantage": {"kind": kind, **numbers}})
    want = [row[0] for row in oracle(algorithm, samples, 9).advantages]
    got = of_episodes(block(kind, **numbers), episodes_of(rewards, groups, valid))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=1e-9, rtol=1e-9)


def test_worked_values() -> None:
    one_of_four = episodes_of([1.0, 0, 0, 0], [0] * 4)
    for kind, want in {"grpo": [1.5, -0.5], "rloo": [1.0, -1 / 3], "dr_grpo": [0.75, -0.25]}.items():
        assert of_episodes(block(kind), one_of_four)[:2] == pytest.approx(want, abs=1e-5)


def test_gae_of_three_tokens() -> None:
    episodes = Episodes(
        groups=Groups.of(torch.tensor([0]), torch.tensor([True])),
        rewards=torch.tensor([1.0], dtype=torch.float64),
        place=torch.arange(3),
        episode=torch.zeros(3, dtype=torch.int64),
        lengths=torch.tensor([3]),
        values=torch.tensor([0.5, 0.6, 0.7], dtype=torch.float64),
    )
    found = estimate(block("gae", whiten=False), episodes)
    assert found.advantages.tolist() == pytest.approx([0.46575, 0.385, 0.3])
    assert found.returns is not None and found.returns.tolist() == pytest.approx([0.96575, 0.985, 1.0])


def test_advantage_of_a_lone_success_in_eight_is_positive_and_about_2_47() -> None:
    got = of_episodes(block("grpo"), episodes_of([1.0] + [0.0] * 7, [0] * 8))
    assert got[0] == pytest.approx(2.4749, abs=1e-3)


@pytest.mark.parametrize("kind", GROUP_RELATIVE)
def test_a_group_without_spread_and_a_singleton_group_give_exactly_0(kind: str) -> None:
    got = of_episodes(block(kind, **cells.BITING.get(kind, {})), episodes_of([0.3] * 7 + [1.0], [0] * 7 + [1]))
    assert got == [0.0] * 8


@pytest.mark.parametrize("kind", WITHOUT_CRITIC)
def test_an_invalid_sample_moves_nothing(kind: str) -> None:
    options = block(kind, **cells.BITING.get(kind, {}))
    whole = of_episodes(options, episodes_of([1.0, 0.0, 0.5, 9.0], [0] * 4, [True, True, True, False]))
    without = of_episodes(options, episodes_of([1.0, 0.0, 0.5], [0] * 3))
    assert whole == pytest.approx([*without, 0.0])


def test_equal_prompts_in_different_groups_stay_apart() -> None:
    got = of_episodes(block("dr_grpo"), episodes_of([1.0, 0.0, 0.0, 0.0], [7, 7, 3, 3]))
    assert got == [0.5, -0.5, 0.0, 0.0]


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(ValueError, match="maxrl.*-1"):
        estimate(block("maxrl"), episodes_of([1.0, -1.0], [0, 0]))


@pytest.mark.parametrize(
    ("kind", "word"), [("gae", "critic"), ("vapo", "critic"), ("remax", "greedy"), ("gigpo", "turns")]
)
def test_what_an_estimator_reads_must_be_there(kind: str, word: str) -> None:
    bare = replace(episodes_of([1.0, 0.0], [0, 0]), greedy=None, turn=None)
    with pytest.raises(ValueError, match=word):
        estimate(block(kind), bare)
