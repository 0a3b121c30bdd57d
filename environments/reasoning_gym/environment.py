"""Any task of reasoning-gym, by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator
from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from nemo_rl_like.environment.splits import Splits, split_by_content
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

QUIET_DRAWS = 20
"""An enumeration ends after this many draws per question found (at least `MIN_QUIET`) that bring nothing new."""
MIN_QUIET = 1000
DEFAULT_TRAIN = 2000
_NUMBER = re.compile(r"-?\d+")
_CHAIN = re.compile(r"(?<![\d.])-?\d+(?:\s*[-+]\s*-?\d+)+(?![\d.])|(?<![\d.])-?\d+(?:\s*[*×]\s*-?\d+)+(?![\d.])")
_TERM = re.compile(r"([-+*×]?)\s*(-?\d+)")


class ReasoningGymConfig(EnvironmentConfig):
    """Settings of `reasoning_gym`."""

    task: str
    """Name of the reasoning-gym dataset, for example `chain_sum`."""
    task_config: dict[str, Any] = Field(default_factory=dict)
    """Its own settings, without `size` and `seed`."""
    seed: NonNegativeInt = 1
    """Seed of the questions."""
    suffix: str = ""
    """Text added to each question."""
    reward: Literal["score_answer", "first_integer"] = "score_answer"
    """`score_answer`: the dataset's own grader on the whole response; `first_integer`: its first whole number must be the answer."""
    enumerate_unique: bool = False
    """Draw until no new question turns up and use each once (small question spaces); `train` then defaults to all that are left."""
    answer_pattern: str | None = None
    """Keep only questions whose whole answer matches this regular expression, for example `[0-9]+`; default: all."""
    train: PositiveInt | None = None
    """Number of training questions; default: 2,000, or all that are left with `enumerate_unique`."""
    validation: NonNegativeInt = 0
    """Number of validation questions."""
    test: NonNegativeInt = 50
    """Number of test questions."""
    split_seed: int = 0
    """Seed of the split."""
    max_draws: PositiveInt = 200_000
    """Most questions drawn while looking for distinct ones."""

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    def wants(self, answer: object) -> bool:
        """Whether a question with this answer is kept."""
        return self.answer_pattern is None or re.fullmatch(self.answer_pattern, str(answer)) is not None


class ReasoningGymSource(SingleTurnSource[ReasoningGymConfig]):
    """Distinct questions of one dataset; questions that differ only in the order of a sum or product stay on one side."""

    config_model = ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig) -> None:
        super().__init__(config)
        self._dataset = _dataset(config)
        self._splits = self._split()

    def tasks(self, split: str) -> Sequence[Task]:
        """Questions of a split."""
        return self._splits.named(split)

    def prompt(self, task: Task) -> Reset:
        """The question and the suffix."""
        return Reset(messages=(user(f"{task.data['question']}{self.config.suffix}"),))

    async def score(self, tasks: Sequence[Task], responses: Sequence[str]) -> Sequence[Step | Unscorable]:
        """The dataset's grade, or 1 for the right first whole number."""
        return [self._graded(task, response) for task, response in zip(tasks, responses, strict=True)]

    def demonstration(self, task: Task, epoch: int = 0) -> str:
        """The dataset's answer. Raises NoDemonstration where it has none."""
        answer = task.data["answer"]
        return str(answer) if answer is not None else super().demonstration(task, epoch)

    def _graded(self, task: Task, response: str) -> Step:
        if self.config.reward == "first_integer":
            found = _NUMBER.search(response)
            grade = float(found is not None and found.group() == task.data["answer"])
        else:
            grade = float(self._dataset.score_answer(response.strip(), self._dataset[task.data["index"]]))
        return Step(reward=grade, rewards={self.config.reward: grade}, terminated=True)

    def _split(self) -> Splits[Task]:
        config = self.config
        tasks = _enumerated(self._dataset, config) if config.enumerate_unique else _first(self._dataset, config)
        train = config.train if config.enumerate_unique else (config.train or DEFAULT_TRAIN)
        return split_by_content(
            sorted(tasks, key=lambda task: str(task.data["question"])),
            lambda task: content_key(str(task.data["question"])),
            validation=config.validation,
            test=config.test,
            train=train,
            seed=config.split_seed,
        )


def content_key(question: str) -> str:
    """The question with every chain of sums or products in one order: `3 + 4` as `4 + 3`, `9 - 4 + 1` as `1 + 9 - 4`."""
    return _CHAIN.sub(lambda chain: _ordered(chain.group()), " ".join(question.split()))


def _ordered(chain: str) -> str:
    terms = [(sign if sign not in ("", "+") else "", number) for sign, number in _TERM.findall(chain)]
    if any(sign in ("*", "×") for sign, _ in terms):
        return "*".join(sorted(number for _, number in terms))
    values = sorted(-int(number) if sign == "-" else int(number) for sign, number in terms)
    return "".join(f"{value:+d}" for value in values)


def _dataset(config: ReasoningGymConfig) -> Any:
    """The reasoning-gym dataset. Raises SpecError for an unknown name or settings that do not fit."""
    if config.task not in DATASETS:
        near = difflib.get_close_matches(config.task, DATASETS, n=3, cutoff=0.5)
        hint = f" (did you mean {' or '.join(repr(n) for n in near)}?)" if near else ""
        raise SpecError(
            f"environment.config.task: {config.task!r} is unknown{hint}; known are {', '.join(sorted(DATASETS))}"
        )
    for key in ("size", "seed"):
        if key in config.task_config:
            raise SpecError(
                f"environment.config.task_config.{key}: is set by `{'max_draws' if key == 'size' else 'seed'}`; leave it out"
            )
    try:
        return create_dataset(config.task, size=config.max_draws, seed=config.seed, **config.task_config)
    except (TypeError, AssertionError, ValueError) as error:
        raise SpecError(f"environment.config.task_config: does not fit {config.task}: {error}") from error


def _first(dataset: Any, config: ReasoningGymConfig) -> list[Task]:
    """The first distinct questions, one of each that differ only in the order of terms, as many as the splits ask for."""
    wanted = (config.train or DEFAULT_TRAIN) + config.validation + config.test
    tasks: dict[str, Task] = {}
    for index in range(config.max_draws):
        task = _task(dataset, index)
        if config.wants(task.data["answer"]):
            tasks.setdefault(content_key(str(task.data["question"])), task)
        if len(tasks) == wanted:
            return list(tasks.values())
    raise SpecError(
        f"environment.config: the splits ask for {wanted} distinct questions, but {config.max_draws} draws of {config.task} brought "
        f"{len(tasks)}; lower train, validation or test, or use `enumerate_unique: true`"
    )


def _enumerated(dataset: Any, config: ReasoningGymConfig) -> list[Task]:
    """Every question, each once."""
    tasks: dict[str, Task] = {}
    last = 0
    for index in range(config.max_draws):
        if index - last > max(MIN_QUIET, QUIET_DRAWS * len(tasks)):
            return _some(tasks, config)
        task = _task(dataset, index)
        if config.wants(task.data["answer"]) and tasks.setdefault(str(task.data["question"]), task) is task:
            last = index
    raise SpecError(
        f"environment.config.enumerate_unique: {config.max_draws} draws of {config.task} still bring new questions "
        f"({len(tasks)} so far); raise `max_draws`, or give `train` and leave `enumerate_unique` out"
    )


def _some(tasks: dict[str, Task], config: ReasoningGymConfig) -> list[Task]:
    if not tasks:
        raise SpecError(
            f"environment.config.answer_pattern: no answer of {config.task} matches {config.answer_pattern!r}; leave it out or widen it"
        )
    return list(tasks.values())


def _task(dataset: Any, index: int) -> Task:
    entry = dataset[index]
    return Task(id=f"q{index}", data={"question": entry["question"], "answer": entry["answer"], "index": index})
