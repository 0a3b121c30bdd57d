"""`DataService`: examples of a dataset as token batches, in a shuffled order that is a function of (seed, position)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import ray

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.datasets import conversation_key, hold_out
from nemo_rl_like.data.messages import Message
from nemo_rl_like.data.order import DataPosition, ShuffledOrder, check_resumes
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.trained_rows import TrainedRows
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Examples(Protocol[T_co]):
    """Training and validation examples."""

    sha256: str
    """Hash of the training examples."""
    source: str
    """Where they come from, for messages."""

    def train_size(self) -> int:
        """Training examples."""
        ...

    def train(self, index: int, epoch: int) -> T_co:
        """One training example; `epoch` may change its label noise."""
        ...

    def validation(self, count: int) -> Sequence[T_co]:
        """The first `count` validation examples, fewer if there are fewer."""
        ...


class FileExamples(Generic[T]):
    """The examples of a file, the same in every epoch; a fraction is held out, those of equal `key` messages together."""

    def __init__(
        self,
        source: str,
        sha256: str,
        examples: Sequence[T],
        key: Callable[[T], Sequence[Message]],
        fraction: float,
        seed: int,
    ) -> None:
        self.source, self.sha256 = source, sha256
        self._train, self._held = hold_out(examples, lambda e: conversation_key(key(e)), fraction, seed)

    def train_size(self) -> int:
        """Training examples."""
        return len(self._train)

    def train(self, index: int, epoch: int) -> T:
        """One training example."""
        return self._train[index]

    def validation(self, count: int) -> Sequence[T]:
        """The first `count` held-out examples."""
        return self._held[:count]


@dataclass(frozen=True, slots=True)
class DataBatch:
    """The examples of one step."""

    batch: ray.ObjectRef
    """TokenBatch."""
    position: DataPosition
    """Where the next step starts."""
    tokens: int
    """Tokens of the batch."""
    dropped: int
    """Examples without a trained token, or longer than the context."""


class DataService(ABC, Generic[T]):
    """Batches of examples; a subclass says what rows become of them."""

    def __init__(self, examples: Examples[T], *, tokenizer_folder: str, seed: int, max_tokens: int) -> None:
        """Raises InputError for a tokenizer that cannot be used."""
        self._examples = examples
        self._renderer = Renderer.load(tokenizer_folder)
        self._order = ShuffledOrder(examples.train_size(), seed)
        self._max_tokens = max_tokens

    def start(self) -> DataPosition:
        """The position of a new run."""
        return DataPosition(self._examples.sha256)

    def batch(self, position: DataPosition, count: int) -> DataBatch:
        """The next `count` examples. Raises InputError if none of them can be trained, or the data has changed."""
        check_resumes(position, self._examples.sha256, self._examples.source)
        draws = self._order.draws(position.consumed, count)
        return self._made([self._examples.train(draw.index, draw.epoch) for draw in draws], position.advance(count))

    def validation(self, count: int) -> ray.ObjectRef | None:
        """A batch of held-out examples, or None where there are none."""
        examples = self._examples.validation(count)
        return self._made(examples, self.start()).batch if examples else None

    @abstractmethod
    def _rows(self, examples: Sequence[T]) -> TrainedRows:
        """The rows of these examples."""

    def _finished(self, batch: TokenBatch, examples: Sequence[T]) -> TokenBatch:
        """The batch of these examples with what else it carries."""
        return batch

    def _made(self, examples: Sequence[T], position: DataPosition) -> DataBatch:
        return self._batched(self._rows(examples), examples, position)

    def _batched(self, made: TrainedRows, examples: Sequence[T], position: DataPosition) -> DataBatch:
        if not made.rows:
            raise InputError(
                f"{self._examples.source}: none of {len(examples)} examples can be trained: {made.dropped_untrained} "
                f"have no assistant message and {made.dropped_too_long} are longer than the context of {self._max_tokens} tokens"
            )
        batch = self._finished(batch_rows(made.rows), examples)
        dropped = made.dropped_untrained + made.dropped_too_long
        return DataBatch(ray.put(batch), position, batch.tokens.numel(), dropped)
