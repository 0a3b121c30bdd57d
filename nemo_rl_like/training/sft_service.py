"""`SftService`: supervised examples as token batches, from a file or from an environment's demonstrations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import ray

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.datasets import load_messages, split_dataset
from nemo_rl_like.data.messages import Message, assistant
from nemo_rl_like.data.order import DataPosition, ShuffledOrder, check_resumes
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.sft_rows import sft_rows
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.environment.types import EnvironmentConfig, EnvironmentSource, Task
from nemo_rl_like.rollout.taskorder import task_list
from nemo_rl_like.spec.experiment import EnvironmentSpec, SftDataSpec
from nemo_rl_like.tokens.batch import batch_rows

logger = logging.getLogger(__name__)


class Conversations(Protocol):
    """Training and validation conversations."""

    sha256: str
    """Hash of the training examples."""
    source: str
    """Where they come from, for messages."""

    def train_size(self) -> int:
        """Training examples."""
        ...

    def train(self, index: int, epoch: int) -> Sequence[Message]:
        """One training conversation; `epoch` may change its label noise."""
        ...

    def validation(self, count: int) -> list[Sequence[Message]]:
        """The first `count` validation conversations, fewer if there are fewer."""
        ...


@dataclass(frozen=True, slots=True)
class SftBatch:
    """The examples of one step."""

    batch: ray.ObjectRef
    """TokenBatch."""
    position: DataPosition
    """Where the next step starts."""
    tokens: int
    """Tokens of the batch."""
    dropped: int
    """Examples without a trained token, or longer than the context."""


class SftService:
    """Batches of conversations in a shuffled order that is a function of (seed, position)."""

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
        self._renderer = Renderer.load(tokenizer_folder)
        self._conversations = _open(data, environment, seed)
        self._order = ShuffledOrder(self._conversations.train_size(), seed)
        self._max_tokens = max_tokens

    def start(self) -> DataPosition:
        """The position of a new run."""
        return DataPosition(self._conversations.sha256)

    def batch(self, position: DataPosition, count: int) -> SftBatch:
        """The next `count` examples. Raises InputError if none of them can be trained, or the data has changed."""
        check_resumes(position, self._conversations.sha256, self._conversations.source)
        draws = self._order.draws(position.consumed, count)
        conversations = [self._conversations.train(draw.index, draw.epoch) for draw in draws]
        return self._made(conversations, position.advance(count))

    def validation(self, count: int) -> ray.ObjectRef | None:
        """A batch of held-out examples, or None where there are none."""
        conversations = self._conversations.validation(count)
        return self._made(conversations, self.start()).batch if conversations else None

    def _made(self, conversations: Sequence[Sequence[Message]], position: DataPosition) -> SftBatch:
        made = sft_rows(conversations, self._renderer, max_tokens=self._max_tokens)
        if not made.rows:
            raise InputError(
                f"{self._conversations.source}: none of {len(conversations)} examples can be trained: {made.dropped_untrained} "
                f"have no assistant message and {made.dropped_too_long} are longer than the context of {self._max_tokens} tokens"
            )
        batch = batch_rows(made.rows)
        dropped = made.dropped_untrained + made.dropped_too_long
        return SftBatch(ray.put(batch), position, batch.tokens.numel(), dropped)


def _open(data: SftDataSpec, environment: EnvironmentSpec | None, seed: int) -> Conversations:
    if data.path is not None:
        return FileConversations(data.path, data.validation_fraction, seed)
    if environment is None:
        raise InputError("data.environment_demonstrations needs an `environment` block")
    return Demonstrations(resolve(environment))


class FileConversations:
    """Conversations of a JSONL file, a fraction of them held out by content."""

    def __init__(self, path: str, fraction: float, seed: int) -> None:
        dataset = load_messages(path)
        self.source, self.sha256 = dataset.source, dataset.sha256
        self._train, self._held = split_dataset(dataset, fraction, seed)

    def train_size(self) -> int:
        """Training examples."""
        return len(self._train)

    def train(self, index: int, epoch: int) -> Sequence[Message]:
        """One training conversation."""
        return self._train[index].messages

    def validation(self, count: int) -> list[Sequence[Message]]:
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

    def train(self, index: int, epoch: int) -> Sequence[Message]:
        """Question and answer of one training task; label noise is drawn anew each epoch."""
        return self._conversation(self._train[index], epoch)

    def validation(self, count: int) -> list[Sequence[Message]]:
        """Questions and answers of the first validation tasks."""
        return [self._conversation(task, 0) for task in self._held[:count]]

    def _conversation(self, task: Task, epoch: int) -> Sequence[Message]:
        async def ask() -> Sequence[Message]:
            environment = self._environment.make()
            try:
                return (await environment.reset(task, 0)).messages
            finally:
                await environment.close()

        return (*asyncio.run(ask()), assistant(self._environment.demonstration(task, epoch)))


def check_data(data: SftDataSpec, environment: EnvironmentSpec | None, seed: int) -> None:
    """Open the data and take one example. Raises InputError, SpecError."""
    _open(data, environment, seed).train(0, 0)
