"""A tensor as a model holds it, with the names of the tensors that a file has instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """A whole tensor, still packed, with the names of the Hugging Face tensors in it."""

    names: tuple[str, ...]
    tensor: Tensor
    unpack: Callable[[Tensor], Sequence[Tensor]]
    """Its Hugging Face tensors, in the order of `names`."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors by name."""
        yield from zip(self.names, self.unpack(self.tensor), strict=True)
