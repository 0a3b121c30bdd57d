"""Laws of the calculator environment and of its evaluator."""

import asyncio
import operator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from environments.calculator.environment import CalculatorConfig, CalculatorSource
from environments.calculator.evaluator import MAX_VALUE, CalculationError, evaluate
from nemo_rl_like.environment.types import SpecError, assistant

SOURCE = CalculatorSource(CalculatorConfig(call_reward=0.1, max_calls=2))


def _play(*said, source=SOURCE, task=0):
    async def play():
        environment = source.make()
        await environment.reset(source.tasks("train")[task], 0)
        return [await environment.step(assistant(text)) for text in said]

    return asyncio.run(play())


@st.composite
def _expressions(draw, depth=0):
    """(text, value) of a random expression, the value computed without Python's parser."""
    if depth == 3 or draw(st.booleans()):
        number = draw(st.integers(0, 99))
        return str(number), number
    sign, apply = draw(st.sampled_from([("+", operator.add), ("-", operator.sub), ("*", operator.mul)]))
    (left, a), (right, b) = draw(_expressions(depth + 1)), draw(_expressions(depth + 1))
    assume(abs(apply(a, b)) <= MAX_VALUE)
    return f"({left}{sign} {right})", apply(a, b)


@given(case=_expressions())
def test_expressions_have_their_value(case):
    text, value = case
    if len(text) <= 64:
        assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1+2*3", 7), ("-2*-3", 6), ("10-3-2", 5), ("7//2", 3), ("8/2/2", 2), ("2*(3+4)", 14), (" 5 ", 5)],
)
def test_precedence_and_order(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "ends too early"),
        ("1+", "ends too early"),
        ("1 2", "unexpected '2'"),
        ("(1", r"missing '\)'"),
        ("1)", r"unexpected '\)'"),
        ("2**9", r"unexpected '\*'"),
        ("__import__('os')", "unexpected '_'"),
        ("1/0", "division by zero"),
        ("7/2", "remainder"),
        ("9" * 65, "longer than 64"),
        ("(" * 30 + "1" + ")" * 30, "nested deeper"),
        ("-" * 30 + "1", "nested deeper"),
        ("9999999*9999999", "larger than"),
        ("9" * 40, "larger than"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error_with_a_bound(text, said):
    with pytest.raises(CalculationError, match=said):
        evaluate(text)


def test_a_call_is_answered_and_the_number_after_it_is_graded():
    answer = SOURCE.tasks("train")[0].data["answer"]
    called, ended = _play("let me see <calc>12*7</calc>", f"so it is {answer}")
    assert called.messages[0].content == "<result>84</result>"
    assert (called.reward, called.rewards, called.terminated) == (0.1, {"correct": 0.0, "call": 0.1}, False)
    assert (ended.reward, ended.rewards, ended.terminated) == (1.0, {"correct": 1.0, "call": 0.0}, True)


def test_only_the_first_good_call_is_rewarded_and_one_too_many_ends_the_episode():
    bad, good, over = _play("<calc>1/0</calc>", "<calc>1</calc>", "<calc>2</calc>")
    assert (bad.reward, bad.messages[0].content) == (0.0, "<error>division by zero</error>")
    assert (good.reward, over.reward, over.terminated) == (0.1, 0.0, True)
    assert [s.reward for s in _play("<calc>1</calc>", "<calc>1</calc>")] == [0.1, 0.0]


def test_a_wrong_or_missing_number_is_zero():
    assert [_play(text)[0].reward for text in ("no idea", "123456789")] == [0.0, 0.0]


def test_splits_share_no_expression_and_answers_are_right():
    sides = [SOURCE.tasks(s) for s in ("train", "validation", "test")]
    ids = [{"".join(sorted(t.id)) for t in side} for side in sides]
    assert [len(side) for side in sides] == [1000, 100, 200]
    assert not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    assert all(evaluate(t.id) == int(str(t.data["answer"])) for side in sides for t in side)


def test_a_space_that_is_too_small_is_refused():
    with pytest.raises(SpecError, match="ask for 1300 distinct expressions, but only"):
        CalculatorSource(CalculatorConfig(terms=2, digits=1, operators=("+",)))
