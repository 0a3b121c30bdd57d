"""A file of prompts as the task side of a single-turn environment without a class."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import Field

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.content_split import Splits, split_by_content
from nemo_rl_like.data.datasets import conversation_key, load_messages
from nemo_rl_like.environment.types import (
    JSON,
    EnvironmentConfig,
    EnvironmentContractError,
    Message,
    Reset,
    SingleTurnSource,
    Step,
    Task,
    Unscorable,
)


class PromptFileConfig(EnvironmentConfig):
    """How a file of prompts is split; equal prompts stay on one side."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the distinct prompts held out for validation, rounded down."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the distinct prompts held out for the test, rounded down."""
    split_seed: int = 0
    """Seed of the split."""


C = TypeVar("C", bound=PromptFileConfig)


class PromptFileSource(SingleTurnSource[C]):
    """Tasks from a JSONL file of prompts; subclasses score."""

    def __init__(self, config: C, *, prompts: str, label_key: str) -> None:
        super().__init__(config)
        dataset = load_messages(prompts)
        rows: dict[str, list[Task]] = {}
        self.labelled = False
        for example in dataset.examples:
            where = f"{dataset.source}:{example.line}"
            if example.messages[-1].role == "assistant":
                raise InputError(
                    f"{where}: the last message is the assistant's; a prompt must end where the model is to answer"
                )
            label = example.fields.get(label_key)
            self.labelled = self.labelled or label is not None
            messages = [{"role": m.role, "content": m.content} for m in example.messages]
            task = Task(id=f"row-{example.line}", data={"messages": messages, "label": label})
            rows.setdefault(conversation_key(example.messages), []).append(task)
        self._splits = self._split(rows)

    def _split(self, rows: Mapping[str, list[Task]]) -> Splits[Task]:
        keys = split_by_content(
            list(rows),
            lambda key: key,
            validation=int(len(rows) * self.config.validation_fraction),
            test=int(len(rows) * self.config.test_fraction),
            seed=self.config.split_seed,
        )
        sides = [tuple(task for key in side for task in rows[key]) for side in (keys.train, keys.validation, keys.test)]
        return Splits(train=sides[0], validation=sides[1], test=sides[2])

    def tasks(self, split: str) -> Sequence[Task]:
        """Rows of the file that fall into the split."""
        return self._splits.named(split)

    def prompt(self, task: Task) -> Reset:
        """The row's messages."""
        return Reset(messages=_messages(task))


def prompt_text(task: Task) -> str:
    """The contents of a row's messages, joined by line ends: what a reward function sees as the prompt."""
    return "\n".join(message.content for message in _messages(task))


def steps_of_rewards(rewards: Sequence[float]) -> list[Step | Unscorable]:
    """One terminal step a reward; NaN and infinities are unscorable."""
    return [
        Step(reward=reward, terminated=True)
        if math.isfinite(reward)
        else Unscorable("not_finite", f"the reward is {reward}")
        for reward in rewards
    ]


def checked_rewards(value: object, count: int, who: str) -> list[float]:
    """`value` as `count` floats. Raises EnvironmentContractError that says what came instead."""
    if not isinstance(value, (list, tuple)):
        raise EnvironmentContractError(
            f"{who} returned {type(value).__name__}, must return a list of {count} floats (use `.tolist()` on an array)"
        )
    if len(value) != count:
        raise EnvironmentContractError(
            f"{who} returned {len(value)} rewards for {count} responses; it must return one for each, in order"
        )
    for i, reward in enumerate(value):
        if not isinstance(reward, numbers.Real):
            raise EnvironmentContractError(
                f"{who} returned {type(reward).__name__} at index {i}, must be a float: {reward!r}"
            )
    return [float(reward) for reward in value]


def labels_of(tasks: Sequence[Task]) -> list[JSON]:
    """The label of each row, None where it has none."""
    return [task.data["label"] for task in tasks]


def _messages(task: Task) -> tuple[Message, ...]:
    rows = task.data["messages"]
    if not isinstance(rows, (list, tuple)):
        raise EnvironmentContractError(f"task {task.id}: messages must be a list, got {type(rows).__name__}")
    return tuple(Message(str(row["role"]), str(row["content"])) for row in rows if isinstance(row, Mapping))
