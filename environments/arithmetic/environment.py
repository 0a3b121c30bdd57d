"""Sums, differences and products of whole numbers: `12+34=` is answered by `46`."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from nemo_rl_like.environment.splits import Splits, content_hash, split_by_content
from nemo_rl_like.environment.types import (
    EnvironmentConfig,
    Reset,
    SingleTurnSource,
    SpecError,
    Step,
    Task,
    Unscorable,
    user,
)

Operator = Literal["+", "-", "*"]
APPLY: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ENUMERATE_UP_TO = 50_000
"""Task spaces up to this size are enumerated; of larger ones, distinct tasks are drawn."""


class NoiseConfig(EnvironmentConfig):
    """Systematic mistakes in the demonstrations, never in the grading."""

    kind: Literal["forget_carry"] = "forget_carry"
    """`forget_carry`: a sum is written without its carries (57+68 becomes 115)."""
    probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the demonstrations that are noisy, drawn anew for each task and epoch."""


class ArithmeticConfig(EnvironmentConfig):
    """Settings of `arithmetic`."""

    digits: PositiveInt = 2
    """Digits of each operand (1 digit includes 0)."""
    operators: Annotated[tuple[Operator, ...], Field(min_length=1)] = ("+",)
    """Operators to ask about."""
    train: PositiveInt | None = None
    """Number of training tasks; default: all that are left. Needed when the task space is larger than 50,000."""
    validation: NonNegativeInt = 256
    """Number of validation tasks."""
    test: NonNegativeInt = 512
    """Number of test tasks."""
    split_seed: int = 0
    """Seed of the split and of the draw."""
    noise: NoiseConfig | None = None
    """Label noise of the demonstrations; default: none."""

    @model_validator(mode="after")
    def _fits(self) -> ArithmeticConfig:
        if len(set(self.operators)) != len(self.operators):
            raise ValueError(f"`operators` has one twice: {', '.join(self.operators)}")
        if self.noise is not None and "+" not in self.operators:
            raise ValueError("`noise` forget_carry needs `+` among the `operators`")
        if self.train is None and self.space() > ENUMERATE_UP_TO:
            raise ValueError(
                f"`train` must be given: the task space has {self.space()} tasks, more than {ENUMERATE_UP_TO}"
            )
        return self

    def space(self) -> int:
        """Number of different questions."""
        return len(self.operands()) ** 2 * len(self.operators)

    def operands(self) -> range:
        """Numbers with exactly `digits` digits."""
        return range(0 if self.digits == 1 else 10 ** (self.digits - 1), 10**self.digits)


class ArithmeticSource(SingleTurnSource[ArithmeticConfig]):
    """Arithmetic with exact-match reward; `a+b` and `b+a` are always on the same side of the split."""

    config_model = ArithmeticConfig

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__(config)
        self._splits = _splits(config)

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split; a task's id is its question without `=`."""
        return self._splits.named(split)

    def prompt(self, task: Task) -> Reset:
        """The question, for example `12+34=`."""
        return Reset(messages=(user(f"{task.id}="),))

    async def score(self, tasks: Sequence[Task], responses: Sequence[str]) -> Sequence[Step | Unscorable]:
        """1 for the exact answer (surrounding white space aside), else 0."""
        return [_graded(str(task.data["answer"]), response) for task, response in zip(tasks, responses, strict=True)]

    def demonstration(self, task: Task, epoch: int = 0) -> str:
        """The answer, or the noisy one where (task, epoch) draws noise."""
        noise = self.config.noise
        if noise is None or task.data["operator"] != "+" or not self._is_noisy(task, epoch, noise.probability):
            return str(task.data["answer"])
        return str(add_without_carry(_operand(task, "left"), _operand(task, "right")))

    def _is_noisy(self, task: Task, epoch: int, probability: float) -> bool:
        return content_hash("noise", self.config.split_seed, task.id, epoch) < probability * 2**64


def add_without_carry(left: int, right: int) -> int:
    """The sum of each column's last digit; the leading column is written whole: 57+68 -> 115, 95+13 -> 108."""
    columns = max(len(str(left)), len(str(right)))
    total = 0
    for column in range(columns):
        digits = left // 10**column % 10 + right // 10**column % 10
        total += (digits if column == columns - 1 else digits % 10) * 10**column
    return total


def content_key(task: Task) -> str:
    """Equal for twins: the operands of `+` and `*` are sorted."""
    left, right, sign = _operand(task, "left"), _operand(task, "right"), str(task.data["operator"])
    if sign != "-" and left > right:
        left, right = right, left
    return f"{left}{sign}{right}"


def _graded(answer: str, response: str) -> Step:
    right = float(response.strip() == answer)
    return Step(reward=right, rewards={"exact_match": right}, terminated=True)


def _splits(config: ArithmeticConfig) -> Splits[Task]:
    if config.space() <= ENUMERATE_UP_TO:
        tasks = [_task(a, sign, b) for sign in config.operators for a, b in product(config.operands(), repeat=2)]
    else:
        tasks = _drawn(config)
    return split_by_content(
        tasks,
        content_key,
        validation=config.validation,
        test=config.test,
        train=config.train,
        seed=config.split_seed,
    )


def _drawn(config: ArithmeticConfig) -> list[Task]:
    """Distinct tasks, one of each pair of twins, as many as the splits ask for."""
    wanted = (config.train or 0) + config.validation + config.test
    if wanted > config.space() // 4:
        raise SpecError(
            f"environment.config: the splits ask for {wanted} tasks, more than a quarter of the {config.space()} that exist"
        )
    draw = random.Random(config.split_seed)
    found: dict[str, Task] = {}
    while len(found) < wanted:
        task = _task(draw.choice(config.operands()), draw.choice(config.operators), draw.choice(config.operands()))
        found.setdefault(content_key(task), task)
    return list(found.values())


def _task(left: int, sign: str, right: int) -> Task:
    answer = str(APPLY[sign](left, right))
    return Task(id=f"{left}{sign}{right}", data={"left": left, "operator": sign, "right": right, "answer": answer})


def _operand(task: Task, name: str) -> int:
    value = task.data[name]
    if not isinstance(value, int):
        raise TypeError(f"task {task.id}: {name} must be a whole number, got {value!r}")
    return value
