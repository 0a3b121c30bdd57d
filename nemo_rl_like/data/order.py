"""The order in which examples are consumed: a pure function of (seed, position), so that a resumed run goes on exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.data.content_split import content_hash


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a run stands in its data; belongs to one dataset."""

    dataset_sha256: str
    """Content hash of the dataset."""
    consumed: int = 0
    """Examples consumed since the start, over all epochs."""

    def advance(self, count: int) -> DataPosition:
        """The position after `count` more examples."""
        return replace(self, consumed=self.consumed + count)


def position_of(state: Mapping[str, JSON]) -> DataPosition:
    """The position that `asdict` made `state` of."""
    return DataPosition(str(state["dataset_sha256"]), int(str(state["consumed"])))


@dataclass(frozen=True, slots=True)
class Draw:
    """One example to be consumed."""

    index: int
    """Index in the dataset."""
    epoch: int
    """Pass over the dataset, from 0."""


class ShuffledOrder:
    """Every epoch is its own permutation of `size` examples; a step may reach over the end of an epoch."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise InputError("the dataset is empty; an order needs at least one example")
        self.size = size
        self.seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def draws(self, consumed: int, count: int) -> list[Draw]:
        """The next `count` draws after `consumed` examples."""
        return [self._draw(position) for position in range(consumed, consumed + count)]

    def _draw(self, position: int) -> Draw:
        epoch, offset = divmod(position, self.size)
        if epoch != self._epoch:
            keyed = sorted((content_hash(self.seed, epoch, i), i) for i in range(self.size))
            self._epoch, self._permutation = epoch, [i for _, i in keyed]
        return Draw(index=self._permutation[offset], epoch=epoch)


def check_resumes(position: DataPosition, dataset_sha256: str, source: str) -> None:
    """Raises InputError when the position was saved for another dataset."""
    if position.dataset_sha256 != dataset_sha256:
        raise InputError(
            f"{source}: the checkpoint stands at example {position.consumed} of a dataset with hash {position.dataset_sha256[:12]}, but this "
            f"dataset has hash {dataset_sha256[:12]}; resume with the dataset it was made with, or start a new output folder"
        )
