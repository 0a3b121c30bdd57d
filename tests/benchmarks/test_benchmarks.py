"""What the benchmarks say about their figures: when a level counts as reached, training time without evaluations, rewards."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_rl_like.spec.loader import load_spec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def module() -> Any:
    """Imports a benchmark by name, as the scripts import each other."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield lambda name: importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def evaluated(*levels: float) -> list[dict[str, Any]]:
    """A curve with an evaluation every 5 steps of one second each, and plain steps between them."""
    curve = [{"step": step, "seconds": float(step), "reward": 0.5} for step in range(5 * len(levels) - 4)]
    for i, level in enumerate(levels):
        curve[5 * i] |= {"heldout_avg@4": level, "heldout_greedy": level}
    return curve


def test_a_level_is_reached_at_the_second_evaluation_in_a_row_and_never_by_one_alone(module: Any) -> None:
    curves: ModuleType = module("smollm2_curves")
    assert curves.reached(evaluated(0.1, 0.9, 0.7, 0.8, 0.8)) == {"step": 20, "seconds": 20.0, "avg@4": 0.8}
    assert curves.reached(evaluated(0.1, 0.9, 0.7, 0.9)) is None


def test_training_seconds_leave_evaluations_out(module: Any) -> None:
    rows = [
        {"step": 0, "eval/avg@4": 0.1, "eval/accuracy": 0.2, "timing/evaluate": 50.0},
        {"step": 1, "reward": 0.1, "timing/step": 3.0},
        {
            "step": 2,
            "reward": 0.2,
            "timing/step": 10.0,
            "timing/evaluate": 6.0,
            "eval/avg@4": 0.3,
            "eval/accuracy": 0.4,
        },
    ]
    curve = module("smollm2_curves").curve_of(rows)
    assert [point["seconds"] for point in curve] == [0.0, 3.0, 7.0]
    assert curve[2]["heldout_avg@4"] == 0.3


def test_a_system_is_compared_at_the_rate_at_which_its_median_seed_was_fastest(module: Any) -> None:
    def leg(seed: int, lr: float, seconds: float | None) -> dict[str, Any]:
        found = None if seconds is None else {"seconds": seconds}
        return {"system": "ours", "engine": "embedded", "seed": seed, "lr": lr, "reached": found}

    legs = [leg(1, 1e-5, 90.0), leg(1, 2e-5, 50.0), leg(2, 2e-5, 70.0), leg(3, 2e-5, 60.0), leg(1, 4e-5, None)]
    (found,) = module("smollm2_race").compare(legs).values()
    assert found["best_lr"] == 2e-5
    assert found["seconds_to_0.8_by_rate_and_seed"][2e-5] == {1: 50.0, 2: 70.0, 3: 60.0}


def test_rewards_grade_the_first_whole_number_and_tell_different_answers_apart(module: Any) -> None:
    rewards = module("rewards")
    answers = ["It is -7.", "7 - 0", "none"]
    assert rewards.first_integer([""] * 3, answers, labels=["-7", "7", "0"]) == [1.0, 1.0, 0.0]
    values = rewards.distinct([""] * 3, answers)
    assert len(set(values)) == 3 and all(0 <= value < 1 for value in values)


def test_the_smollm2_config_holds_out_50_questions_whose_twins_are_not_trained(module: Any) -> None:
    from nemo_rl_like.environment.registry import resolve

    spec = load_spec(ROOT / "configs" / "smollm2_arithmetic.yaml")
    assert spec.environment is not None
    source = resolve(spec.environment)
    train, test = ([str(task.data["question"]) for task in source.tasks(split)] for split in ("train", "test"))
    assert (len(train), len(test)) == (105, 50)
    assert not {frozen(text) for text in train} & {frozen(text) for text in test}


def frozen(question: str) -> tuple[str, ...]:
    """A question's operator and operands, in one order for a sum."""
    left, sign, right = next(words for words in windows(question.split()) if words[1] in "+-")
    return (sign, *sorted((left, right))) if sign == "+" else (sign, left, right)


def windows(words: list[str]) -> list[tuple[str, str, str]]:
    """Every three words in a row."""
    return list(zip(words, words[1:], words[2:], strict=False))
