"""Laws of choosing among a prompt's episodes, against a search over all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.data.messages import Message, assistant, user
from nemo_rl_like.rollout.choice import Counts, Rule, choose, counts_of, example_line
from nemo_rl_like.rollout.episode import Episode, Segment


def episode(number: int, text: str, reward: float, stop: str = "stop") -> Episode:
    """One with three sampled tokens; a reward that is not a number makes it invalid."""
    segment = Segment((1, 2, 3, 4), 1, (False, True, True, True), (0.0,) * 4, (-1, 0, 0, 0), (-1, 0, 0, 0), (0.0,) * 4)
    invalid = "failed" if math.isnan(reward) else None
    messages: tuple[Message, ...] = (user("1+1="), assistant(text))
    return Episode(number, 0, "t", messages, 1, (segment,), reward, {}, {}, (), stop, 1, invalid)


EPISODES = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0, math.nan]), st.sampled_from(["stop", "stop", "length"])
    ),
    max_size=7,
).map(lambda rows: [episode(i, *row) for i, row in enumerate(rows)])


def searched(group: Sequence[Episode], keep: int, least: float | None, cut: bool) -> list[int]:
    """What must be kept: again and again the highest reward, of equal ones the first, whose text was not taken."""
    left = [e for e in group if not math.isnan(e.reward) and (cut or e.stop == "stop")]
    found: list[Episode] = []
    while left and len(found) < keep:
        best = left[0]
        for e in left:
            if e.reward > best.reward:
                best = e
        left.remove(best)
        fits = least is None or best.reward >= least
        if fits and all(best.response != e.response for e in found):
            found.append(best)
    return [e.id for e in found]


@settings(deadline=None)
@given(EPISODES, st.integers(1, 4), st.sampled_from([None, 0.5, 1.0]), st.booleans())
def test_the_best_are_kept(group: list[Episode], keep: int, least: float | None, cut: bool) -> None:
    kept = choose(group, Rule(keep, least, cut))
    assert [e.id for e in kept] == searched(group, keep, least, cut)


@settings(deadline=None)
@given(EPISODES, EPISODES)
def test_counts_of_parts_add_up(one: list[Episode], two: list[Episode]) -> None:
    rule = Rule(2)
    total = counts_of(one, choose(one, rule)) + counts_of(two, choose(two, rule))
    report = total.report()
    assert (report["prompts"], report["samples"]) == (2, len(one) + len(two))
    valid = [e.reward for e in (*one, *two) if not math.isnan(e.reward)]
    assert report["invalid"] == len(one) + len(two) - len(valid)
    assert report["tokens"] == 3 * (len(one) + len(two))
    assert report["reward_before"] == (pytest.approx(sum(valid) / len(valid)) if valid else None)


def test_a_mean_over_nothing_is_null() -> None:
    assert Counts().report()["reward_after"] is None


def test_a_line_is_a_whole_conversation_with_its_origin() -> None:
    assert json.loads(example_line(episode(3, "2", 1.0), 3)) == {
        "messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
        "reward": 1.0,
        "task": "t",
        "sample": 3,
    }
