"""Laws of the reasoning-gym environment."""

import asyncio
import re

import pytest

from environments.reasoning_gym.environment import ReasoningGymConfig, ReasoningGymSource, content_key
from nemo_rl_like.environment.types import SpecError

CHAIN = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SUFFIX = " Answer with just the number."


def _chain_sum(**more) -> ReasoningGymSource:
    settings = {
        "task": "chain_sum",
        "task_config": CHAIN,
        "enumerate_unique": True,
        "test": 50,
        "suffix": SUFFIX,
        **more,
    }
    return ReasoningGymSource(ReasoningGymConfig(**settings))


def _rewards(source, tasks, responses):
    return [step.reward for step in asyncio.run(source.score(tasks, responses))]


def test_the_two_hundred_one_digit_sums_are_each_found_once_and_twins_stay_together():
    source = _chain_sum()
    train, test = ([t.data["question"] for t in source.tasks(s)] for s in ("train", "test"))
    assert (len(train), len(test), len({*train, *test})) == (150, 50, 200)
    for question in test:
        a, sign, b = re.search(r"(\d) ([+-]) (\d)", question).groups()
        twin = question.replace(f"{a} + {b}", f"{b} + {a}")
        assert sign == "-" or twin not in train
    assert not {content_key(q) for q in train} & {content_key(q) for q in test}


def test_only_questions_with_a_wanted_answer_are_kept():
    source = _chain_sum(answer_pattern="[0-9]+")
    kept = [*source.tasks("train"), *source.tasks("test")]
    assert len(kept) == 155 and len(source.tasks("test")) == 50
    assert all(task.data["answer"].isdigit() for task in kept)
    drawn = ReasoningGymSource(ReasoningGymConfig(task="chain_sum", train=5, test=5, answer_pattern="-[0-9]+"))
    assert all(task.data["answer"].startswith("-") for task in [*drawn.tasks("train"), *drawn.tasks("test")])


def test_the_seed_of_the_questions_does_not_move_the_held_out_ones():
    held = [{t.data["question"] for t in _chain_sum(seed=seed).tasks("test")} for seed in (1, 2)]
    assert held[0] == held[1]


def test_content_key_orders_sums_and_products_only():
    assert content_key("is 3 + 4 = ?") == content_key("is 4 +  3 = ?")
    assert content_key("9 - 4 + 1 =") == content_key("1 + 9 - 4 =")
    assert content_key("9 - 4 =") != content_key("4 - 9 =")
    assert content_key("3 * 4 =") == content_key("4 * 3 =")
    assert content_key("3 + 4 =") != content_key("3 * 4 =")
    assert content_key("from 3 to 4") != content_key("from 4 to 3")


@pytest.mark.parametrize(
    ("response", "first_integer", "score_answer"),
    [("{}", 1.0, 1.0), ("The answer is {}.", 1.0, 0.0), ("{}0", 0.0, 0.0), ("", 0.0, 0.0)],
)
def test_both_graders(response, first_integer, score_answer):
    for reward, expected in (("first_integer", first_integer), ("score_answer", score_answer)):
        source = _chain_sum(reward=reward)
        task = next(t for t in source.tasks("train") if t.data["answer"] == "7")
        got = _rewards(source, [task], [response.format(7)])
        assert got == [expected] if expected else got[0] < 1.0


@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "word_sorting", "syllogism"])
def test_other_datasets_work_by_name_and_their_answers_score(name):
    source = ReasoningGymSource(ReasoningGymConfig(task=name, train=20, test=10))
    assert [len(source.tasks(s)) for s in ("train", "validation", "test")] == [20, 0, 10]
    tasks = source.tasks("train")
    assert _rewards(source, tasks, [source.demonstration(t) for t in tasks]) == [1.0] * 20
    assert source.prompt(tasks[0]).messages[0].content == tasks[0].data["question"]


def test_settings_that_cannot_work_say_why():
    with pytest.raises(SpecError, match="answer_pattern: no answer of chain_sum matches 'x'"):
        _chain_sum(answer_pattern="x")
    with pytest.raises(ValueError, match=r"'\[' is not a regular expression"):
        _chain_sum(answer_pattern="[")
    with pytest.raises(SpecError, match=r"'chain_sums' is unknown \(did you mean 'chain_sum'"):
        _chain_sum(task="chain_sums")
    with pytest.raises(SpecError, match="does not fit chain_sum: .*min_term"):
        _chain_sum(task_config={"min_term": 1})
    with pytest.raises(SpecError, match="does not fit chain_sum: max_terms must be >= min_terms"):
        _chain_sum(task_config={"min_terms": 3, "max_terms": 2})
    with pytest.raises(SpecError, match=r"task_config\.seed: is set by `seed`"):
        _chain_sum(task_config={"seed": 1})
    with pytest.raises(SpecError, match="2000 draws of chain_sum still bring new questions"):
        _chain_sum(task_config={}, max_draws=2000)
    with pytest.raises(SpecError, match="3000 draws of chain_sum brought 1[0-9][0-9];"):
        _chain_sum(enumerate_unique=False, max_draws=3000)
