"""Laws of the arithmetic environment."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.arithmetic.environment import ArithmeticConfig, ArithmeticSource, add_without_carry, content_key
from nemo_rl_like.environment.types import SpecError

SOURCE = ArithmeticSource(ArithmeticConfig(noise={"probability": 0.5}))


def _answers(source, tasks, responses):
    return [step.reward for step in asyncio.run(source.score(tasks, responses))]


def test_twins_are_on_one_side_and_all_sums_are_somewhere():
    sides = [SOURCE.tasks(s) for s in ("train", "validation", "test")]
    keys = [{content_key(t) for t in side} for side in sides]
    assert not (keys[0] & keys[1] or keys[0] & keys[2] or keys[1] & keys[2])
    assert [len(side) for side in sides] == [8100 - 768, 256, 512]
    ids = {t.id for side in sides for t in side}
    assert len(ids) == 8100
    for side in sides:
        present = {t.id for t in side}
        assert {"+".join(reversed(i.split("+"))) for i in present} == present


def test_a_difference_is_no_twin_of_its_reverse():
    source = ArithmeticSource(ArithmeticConfig(digits=1, operators=("-",), validation=0, test=20))
    assert {content_key(t) for t in source.tasks("train")}.isdisjoint({content_key(t) for t in source.tasks("test")})
    assert len(source.tasks("test")) == 20


def test_only_the_exact_answer_scores():
    task = next(t for t in SOURCE.tasks("train") if t.id == "57+68")
    assert SOURCE.prompt(task).messages[0].content == "57+68="
    assert _answers(SOURCE, [task] * 5, ["125", " 125\n", "125.", "0125", "115"]) == [1.0, 1.0, 0.0, 0.0, 0.0]


@given(left=st.integers(10, 99), right=st.integers(10, 99))
def test_forgetting_carries_is_wrong_exactly_where_there_is_one(left, right):
    carries = left % 10 + right % 10 > 9
    assert add_without_carry(left, right) == left + right - (10 if carries else 0)


def test_noise_is_a_function_of_task_and_epoch_and_never_touches_grading():
    tasks = [t for t in SOURCE.tasks("train") if int(t.data["left"]) % 10 + int(t.data["right"]) % 10 > 9]
    first = [SOURCE.demonstration(t, 0) for t in tasks]
    again = ArithmeticSource(SOURCE.config)
    assert first == [again.demonstration(t, 0) for t in tasks]
    assert first != [SOURCE.demonstration(t, 1) for t in tasks]
    wrong = sum(d != t.data["answer"] for d, t in zip(first, tasks, strict=True)) / len(tasks)
    assert 0.45 < wrong < 0.55
    assert _answers(SOURCE, tasks[:3], [str(t.data["answer"]) for t in tasks[:3]]) == [1.0] * 3


def test_without_noise_every_demonstration_is_right():
    source = ArithmeticSource(ArithmeticConfig(operators=("+", "-", "*"), digits=1, validation=10, test=10))
    tasks = source.tasks("train")
    assert _answers(source, tasks, [source.demonstration(t, 3) for t in tasks]) == [1.0] * len(tasks)


def test_large_spaces_are_drawn_without_repeats():
    source = ArithmeticSource(ArithmeticConfig(digits=5, train=300, validation=20, test=30))
    tasks = [t for s in ("train", "validation", "test") for t in source.tasks(s)]
    assert len({content_key(t) for t in tasks}) == 350
    assert {len(str(t.data["left"])) for t in tasks} == {5}


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="`train` must be given"):
        ArithmeticConfig(digits=3)
    with pytest.raises(ValueError, match="needs `\\+`"):
        ArithmeticConfig(operators=("-",), noise={})
    with pytest.raises(SpecError, match="there are 100"):
        ArithmeticSource(ArithmeticConfig(digits=1))
