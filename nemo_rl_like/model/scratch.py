"""Weights of a model made from scratch: each tensor is drawn whole from a generator of its own, so every layout gets the same."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.weight_entries import HEAD, SCORE
from nemo_rl_like.model.weight_map import WeightMap


class DrawnReader(ABC):
    """A `TensorReader` without files: tensors are a function of (seed, name), drawn when they are read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, what: str) -> None:
        """`what` they are, for messages."""
        self._shapes, self._seed, self._what = shapes, seed, what

    @abstractmethod
    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The tensor, from a generator of its own."""

    def keys(self) -> Sequence[str]:
        """Every tensor's name."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name`."""
        return self._shapes[name]

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        return self.draw(name, self._shapes[name], generator_of(self._seed, name))

    def source(self, name: str) -> str:
        """There is no file."""
        return f"{self._what} with seed {self._seed}"


class ScratchReader(DrawnReader):
    """A model from scratch: normal weights, norms that multiply by one, biases of zero, drawn in float32 and rounded to the model's type."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype) -> None:
        super().__init__(WeightMap(config).hf_shapes(), seed, "a model from scratch")
        self._std, self._dtype = config.init_std, dtype
        self._norm = 1.0 if config.traits.norm == "rms" else 0.0

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The tensor, from a generator of its own."""
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm, dtype=self._dtype)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=self._dtype)
        return torch.empty(shape).normal_(0.0, self._std, generator=generator).to(self._dtype)


class FreshScoreReader:
    """A language model's weights with a new score head in the place of its output head: a `TensorReader` over another.

    The head is zeros, or with a `seed` normal of variance 1 / (H + 1) (Stiennon et al. 2020, arXiv 2009.01325, appendix B).
    """

    def __init__(self, reader: TensorReader, config: ModelConfig, seed: int | None = None) -> None:
        self._reader, self._seed = reader, seed
        self._shapes = WeightMap(config).hf_shapes()

    def keys(self) -> Sequence[str]:
        """Every tensor's name but the output head's."""
        return [key for key in self._reader.keys() if key != HEAD] + [SCORE]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name`."""
        return self._shapes[SCORE] if name == SCORE else self._reader.shape(name)

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        if name != SCORE:
            return self._reader.get(name)
        head = torch.zeros(self._shapes[SCORE])
        if self._seed is None:
            return head
        return head.normal_(0.0, (head.numel() + 1) ** -0.5, generator=generator_of(self._seed, name))

    def source(self, name: str) -> str:
        """Where the tensor is, for messages."""
        return "a new score head" if name == SCORE else self._reader.source(name)


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator of this tensor's own."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
