"""Laws of the beginner's path: a function and a file of prompts are an environment, and a wrong one says what is wrong."""

import json
import textwrap

import pytest

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.environment.pool import EnvironmentPool
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.environment.types import EnvironmentContractError, Unscorable
from nemo_rl_like.spec.environment import EnvironmentSpec

ROWS = [{"messages": [{"role": "user", "content": f"{i}+1="}], "label": str(i + 1)} for i in range(20)]
GOOD = """
def reward_func(prompts, responses, labels=None):
    return [float(r == l) + 10 * p.startswith("3") for p, r, l in zip(prompts, responses, labels)]
"""


def _spec(tmp_path, code: str, rows=ROWS, **more) -> EnvironmentSpec:
    (tmp_path / "reward.py").write_text(textwrap.dedent(code))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return EnvironmentSpec(
        reward=f"{tmp_path}/reward.py:reward_func",
        prompts=str(tmp_path / "prompts.jsonl"),
        **{"step_timeout_s": 20, **more},
    )


async def _score(spec, *responses):
    tasks = {t.id: t for split in ("train", "validation", "test") for t in resolve(spec).tasks(split)}
    async with EnvironmentPool(spec) as pool:
        chosen = [tasks[f"row-{i + 1}"] for i in range(len(responses))]
        results = await pool.score(chosen, responses)
    return [r.reason if isinstance(r, Unscorable) else r.reward for r in results]


async def test_a_function_gets_texts_and_labels_and_its_numbers_are_the_rewards(tmp_path):
    assert await _score(_spec(tmp_path, GOOD), "1", "no", "3", "4") == [1.0, 0.0, 1.0, 11.0]


def test_rows_are_split_by_content_and_may_be_single_messages(tmp_path):
    rows = [{"role": "user", "content": str(i % 10), "label": i} for i in range(30)]
    source = resolve(_spec(tmp_path, GOOD, rows, config={"validation_fraction": 0.2, "test_fraction": 0.3}))
    sides = [{source.prompt(t).messages for t in source.tasks(s)} for s in ("train", "validation", "test")]
    assert [len(s) for s in sides] == [5, 2, 3]
    assert len(set.union(*sides)) == 10
    assert len(source.tasks("train")) == 15


async def test_a_function_without_labels_works_where_there_are_none(tmp_path):
    rows = [{"role": "user", "content": str(i)} for i in range(5)]
    spec = _spec(tmp_path, "def reward_func(prompts, responses):\n    return [len(r) for r in responses]", rows)
    assert await _score(spec, "a", "bb") == [1.0, 2.0]
    with pytest.raises(SpecError, match="has no parameter `labels`"):
        resolve(_spec(tmp_path, "def reward_func(prompts, responses):\n    return []"))


async def test_one_answer_that_makes_the_function_raise_costs_only_itself(tmp_path):
    code = "def reward_func(prompts, responses, labels=None):\n    return [float(r) for r in responses]"
    assert await _score(_spec(tmp_path, code), "1", "x", "nan", "3") == [1.0, "error", "not_finite", 3.0]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("[1.0]", "returned 1 rewards for 2 responses"),
        ("1.0", "returned float, must return a list of 2 floats"),
        ("['a', 'b']", "returned str at index 0"),
        ("None", "returned NoneType"),
    ],
)
async def test_a_result_that_is_no_list_of_numbers_stops_the_run(tmp_path, result, said):
    spec = _spec(tmp_path, f"def reward_func(prompts, responses, labels=None):\n    return {result}")
    with pytest.raises(EnvironmentContractError, match=said):
        await _score(spec, "a", "b")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def other(prompts, responses): ...", "has no function 'reward_func'; it has other"),
        ("def reward_func(prompts): ...", r"cannot be called as reward_func\(prompts, responses, labels=None\)"),
        ("def reward_func(prompts, responses, labels, more): ...", "cannot be called as"),
        ("async def reward_func(prompts, responses, labels=None): ...", "is a coroutine function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_starts(tmp_path, code, said):
    with pytest.raises(SpecError, match=said):
        resolve(_spec(tmp_path, code))


def test_missing_files_and_modules_are_input_errors(tmp_path):
    spec = _spec(tmp_path, GOOD)
    with pytest.raises(InputError, match=r"none\.py: no such file"):
        resolve(spec.model_copy(update={"reward": str(tmp_path / "none.py") + ":f"}))
    with pytest.raises(InputError, match="module 'no_such_module' is not installed"):
        resolve(spec.model_copy(update={"reward": "no_such_module:f"}))
    with pytest.raises(SpecError, match="must be `file.py:function`"):
        resolve(spec.model_copy(update={"reward": "reward.py"}))
    with pytest.raises(InputError, match="no such file"):
        resolve(spec.model_copy(update={"prompts": str(tmp_path / "none.jsonl")}))


def test_a_prompt_that_ends_with_the_assistant_is_refused(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    with pytest.raises(InputError, match=r"prompts\.jsonl:1: the last message is the assistant's"):
        resolve(_spec(tmp_path, GOOD, rows))
