"""Laws of the order of tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.environment.types import Task
from nemo_rl_like.rollout.seeds import environment_seed, sample_seed
from nemo_rl_like.rollout.taskorder import TaskOrder, task_list

TASKS = [Task(f"t{i}", {"n": i}) for i in range(10)]


@given(counts=st.lists(st.integers(1, 25), min_size=2, max_size=5), cut=st.integers(0, 4))
def test_a_resumed_run_asks_what_the_uncut_run_asks(counts, cut):
    order = TaskOrder(task_list("train", TASKS), seed=3)
    position = order.start()
    asked = []
    for i, count in enumerate(counts):
        if i == cut:
            order = TaskOrder(task_list("train", TASKS), seed=3)
        asked += order.draw(position, count)
        position = position.advance(count)
    assert asked == list(TaskOrder(task_list("train", TASKS), seed=3).draw(order.start(), sum(counts)))
    assert set(asked[:10]) <= {t.id for t in TASKS}


def test_tasks_with_other_content_do_not_take_the_position():
    order = TaskOrder(task_list("train", TASKS), seed=3)
    other = TaskOrder(task_list("train", [*TASKS[:-1], Task("t9", {"n": 99})]), seed=3)
    with pytest.raises(InputError, match="the environment's train split"):
        other.draw(order.start(), 1)


def test_seeds_are_pinned_and_differ_in_every_part():
    base = ("train", 1, 2, 3, 4, 5)
    seeds = {sample_seed(*base)}
    for i in range(6):
        changed = list(base)
        changed[i] = "test" if i == 0 else base[i] + 1
        seeds.add(sample_seed(*changed))
    assert len(seeds) == 7
    assert all(0 <= s < 2**63 for s in seeds)
    assert environment_seed("train", 1, 2, 3) not in seeds
