"""A multi-turn task with a tool: the model may write `<calc>12*7</calc>`, reads `<result>84</result>`, and then answers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from environments.calculator.evaluator import CalculationError, evaluate
from nemo_rl_like.environment.splits import split_by_content
from nemo_rl_like.environment.types import (
    Environment,
    EnvironmentConfig,
    EnvironmentContractError,
    EnvironmentSource,
    Message,
    Reset,
    SpecError,
    Step,
    Task,
    Tool,
    user,
)

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
NUMBER = re.compile(r"-?\d+")
CALCULATOR = Tool(
    name="calculator",
    description="Evaluates a whole-number expression.",
    parameters={"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
_MAX_DRAWS_PER_TASK = 100


class CalculatorConfig(EnvironmentConfig):
    """Settings of `calculator`."""

    terms: Annotated[int, Field(ge=2, le=6)] = 3
    """Numbers in one expression."""
    digits: Annotated[int, Field(ge=1, le=4)] = 2
    """Most digits of each number."""
    operators: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1)] = ("+", "-", "*")
    """Operators of the expressions."""
    instruction: str = "You may write <calc>expression</calc> to use a calculator; you then read the result. End with just the number.\n"
    """Text before the question."""
    max_calls: PositiveInt = 4
    """Calls of the calculator in one episode; one more ends it without reward."""
    call_reward: NonNegativeFloat = 0.0
    """Reward of the first call that evaluates."""
    result_role: Literal["user", "tool"] = "user"
    """Role of the calculator's messages; `tool` needs a chat template that knows it."""
    show_tool: bool = False
    """Also pass the calculator to the chat template as a tool."""
    train: PositiveInt = 1000
    """Number of training tasks."""
    validation: NonNegativeInt = 100
    """Number of validation tasks."""
    test: NonNegativeInt = 200
    """Number of test tasks."""
    seed: NonNegativeInt = 0
    """Seed of the expressions and of the split."""


class CalculatorSource(EnvironmentSource[CalculatorConfig]):
    """Expressions to evaluate, with a calculator at hand."""

    config_model = CalculatorConfig

    def __init__(self, config: CalculatorConfig) -> None:
        super().__init__(config)
        self._splits = split_by_content(
            _tasks(config),
            lambda task: "".join(sorted(task.id)),
            validation=config.validation,
            test=config.test,
            train=config.train,
            seed=config.seed,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """Expressions of a split; a task's id is its expression."""
        return self._splits.named(split)

    def make(self) -> Environment:
        """A calculator for one episode."""
        return CalculatorEnvironment(self.config)

    def demonstration(self, task: Task, epoch: int = 0) -> str:
        """The answer, without a call."""
        return str(task.data["answer"])


class CalculatorEnvironment:
    """One episode: calls are answered until a message without a call is graded."""

    def __init__(self, config: CalculatorConfig) -> None:
        self._config = config
        self._task: Task | None = None
        self._calls = 0
        self._rewarded = False

    async def reset(self, task: Task, seed: int) -> Reset:
        """Ask for the expression's value."""
        self._task = task
        question = user(f"{self._config.instruction}{task.id}=")
        return Reset(messages=(question,), tools=(CALCULATOR,) if self._config.show_tool else ())

    async def step(self, message: Message) -> Step:
        """Answer a call, or grade the last number of a message without one."""
        if self._task is None:
            raise EnvironmentContractError("`step` was called before `reset`")
        call = CALL.search(message.content)
        if call is None:
            numbers = NUMBER.findall(message.content)
            return self._end(bool(numbers) and numbers[-1] == self._task.data["answer"])
        self._calls += 1
        if self._calls > self._config.max_calls:
            return self._end(False)
        return self._answer_call(call.group(1))

    async def close(self) -> None:
        """Nothing to let go of."""

    def _answer_call(self, expression: str) -> Step:
        try:
            text = f"<result>{evaluate(expression)}</result>"
        except CalculationError as error:
            return self._said(f"<error>{error}</error>", 0.0)
        reward = 0.0 if self._rewarded else self._config.call_reward
        self._rewarded = True
        return self._said(text, reward)

    def _said(self, text: str, reward: float) -> Step:
        return Step(
            messages=(Message(self._config.result_role, text),),
            reward=reward,
            rewards={"correct": 0.0, "call": reward},
            metrics={"calls": 1.0},
        )

    def _end(self, correct: bool) -> Step:
        return Step(
            reward=float(correct),
            rewards={"correct": float(correct), "call": 0.0},
            terminated=True,
            metrics={"calls": 0.0},
        )


def _tasks(config: CalculatorConfig) -> list[Task]:
    """Expressions that differ by content, one of each that has the same numbers and operators."""
    wanted = config.train + config.validation + config.test
    draw = random.Random(config.seed)
    found: dict[str, Task] = {}
    for _ in range(wanted * _MAX_DRAWS_PER_TASK):
        expression = _expression(draw, config)
        task = Task(id=expression, data={"answer": str(evaluate(expression))})
        found.setdefault("".join(sorted(expression)), task)
        if len(found) == wanted:
            return list(found.values())
    raise SpecError(
        f"environment.config: the splits ask for {wanted} distinct expressions, but only {len(found)} were found; "
        "raise `terms` or `digits`, or lower train, validation or test"
    )


def _expression(draw: random.Random, config: CalculatorConfig) -> str:
    parts = [str(draw.randrange(10**config.digits))]
    for _ in range(config.terms - 1):
        parts += [draw.choice(config.operators), str(draw.randrange(10**config.digits))]
    return "".join(parts)
