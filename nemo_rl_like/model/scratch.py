"""Weights of a model made from scratch: each tensor is drawn whole from a generator of its own, so every layout gets the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.weight_map import HEAD, SCORE, WeightMap


class ScratchReader:
    """A `TensorReader` whose tensors are a function of (seed, name): normal weights, norms of one, biases of zero."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype) -> None:
        self._std, self._seed, self._dtype = config.init_std, seed, dtype
        self._shapes = WeightMap(config).hf_shapes()

    def keys(self) -> Sequence[str]:
        """Every tensor's name."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name`."""
        return self._shapes[name]

    def get(self, name: str) -> Tensor:
        """Draw `name`, in float32, then rounded to the model's type."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=self._dtype)
        return torch.empty(shape).normal_(0.0, self._std, generator=generator_of(self._seed, name)).to(self._dtype)

    def source(self, name: str) -> str:
        """There is no file."""
        return f"a model from scratch with seed {self._seed}"


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
