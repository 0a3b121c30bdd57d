"""`SftService`: supervised examples as token batches, from a file or from an environment's demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.datasets import hold_out, load_messages, split_dataset
from nemo_rl_like.data.messages import Message, assistant
from nemo_rl_like.data.sft_rows import sft_rows
from nemo_rl_like.data.trained_rows import TrainedRows
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.environment.types import EnvironmentConfig, EnvironmentSource, Task
from nemo_rl_like.rollout.taskorder import task_list
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.sft import SftDataSpec
from nemo_rl_like.training.data_service import DataService, Examples

Conversation: TypeAlias = Sequence[Message]


class SftService(DataService[Conversation]):
    """Batches of conversations."""

    def __init__(
        self,
        context: RankContext | None,
        *,
        data: SftDataSpec,
        environment: EnvironmentSpec | None,
        tokenizer_folder: str,
        seed: int,
        max_tokens: int,
    ) -> None:
        """Read and check the data. Raises InputError, SpecError."""
        examples = _open(data, environment, seed)
        super().__init__(examples, tokenizer_folder=tokenizer_folder, seed=seed, max_tokens=max_tokens)

    def _rows(self, examples: Sequence[Conversation]) -> TrainedRows:
        return sft_rows(examples, self._renderer, max_tokens=self._max_tokens)


def _open(data: SftDataSpec, environment: EnvironmentSpec | None, seed: int) -> Examples[Conversation]:
    if data.path is not None:
        return FileConversations(data.path, data.validation_fraction, seed, by_task=data.from_stage is not None)
    if environment is None:
        raise InputError("data.environment_demonstrations needs an `environment` block")
    return Demonstrations(resolve(environment))


class FileConversations:
    """Conversations of a JSONL file, a fraction of them held out: by content, or `by_task` where a `sample` stage made the file."""

    def __init__(self, path: str, fraction: float, seed: int, *, by_task: bool = False) -> None:
        dataset = load_messages(path)
        self.source, self.sha256 = dataset.source, dataset.sha256
        if by_task:
            split = hold_out(dataset.examples, lambda example: str(example.fields["task"]), fraction, seed)
        else:
            split = split_dataset(dataset, fraction, seed)
        self._train, self._held = split

    def train_size(self) -> int:
        """Training examples."""
        return len(self._train)

    def train(self, index: int, epoch: int) -> Conversation:
        """One training conversation."""
        return self._train[index].messages

    def validation(self, count: int) -> list[Conversation]:
        """The first `count` held-out conversations."""
        return [example.messages for example in self._held[:count]]


class Demonstrations:
    """An environment's tasks with its own answers: its train split, and its validation split."""

    def __init__(self, source: EnvironmentSource[EnvironmentConfig]) -> None:
        self._environment = source
        self._train = list(source.tasks("train"))
        self._held = list(source.tasks("validation"))
        self.source = f"demonstrations of {type(source).__name__}"
        self.sha256 = task_list("train", self._train).sha256

    def train_size(self) -> int:
        """Training tasks."""
        return len(self._train)

    def train(self, index: int, epoch: int) -> Conversation:
        """Question and answer of one training task; label noise is drawn anew each epoch."""
        return self._conversation(self._train[index], epoch)

    def validation(self, count: int) -> list[Conversation]:
        """Questions and answers of the first validation tasks."""
        return [self._conversation(task, 0) for task in self._held[:count]]

    def _conversation(self, task: Task, epoch: int) -> Conversation:
        async def ask() -> Conversation:
            environment = self._environment.make()
            try:
                return (await environment.reset(task, 0)).messages
            finally:
                await environment.close()

        return (*asyncio.run(ask()), assistant(self._environment.demonstration(task, epoch)))


def check_data(data: SftDataSpec, environment: EnvironmentSpec | None, seed: int) -> None:
    """Open the data, unless an earlier stage is to make it, and take one example. Raises InputError, SpecError."""
    if data.is_made:
        return
    _open(data, environment, seed).train(0, 0)
