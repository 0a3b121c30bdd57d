"""Weights of a folder, or of a base with the adapters of a PEFT folder merged into each tensor as it is read.

A stage that starts from both has a folder of its own: configuration and tokenizer as files, and links to the two in the place of weights. Every reader of a
model's weights opens its folder with `open_weights`, so none takes the base for the model; transformers finds no weights there and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.outline import outline_of
from nemo_rl_like.model.peft_adapters import LowRank, PeftAdapters

BASE, ADAPTER = "base_model", "adapter"
"""Links in a folder whose weights are merged as they are read."""


class MergedReader:
    """A `TensorReader` of `base` with the adapters of the folder `adapter` merged: W + scale B A in float32, one tensor at a time, in the base's type.

    DoRA's rows have their learned lengths; whole tensors of the adapters' file stand in the place of the base's. Everything is checked when the
    reader is made, by the files' headers. Raises InputError.
    """

    def __init__(self, base: Path, adapter: Path) -> None:
        self._base = SafetensorsReader(base)
        self._adapters = PeftAdapters(adapter)
        self._low_rank = self._adapters.over(self._base, outline_of(base))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap every file; tensors read before stay valid."""
        self._base.close()
        self._adapters.close()

    def keys(self) -> Sequence[str]:
        """Every tensor's name, sorted."""
        return self._base.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name`."""
        return self._base.shape(name)

    def get(self, name: str) -> Tensor:
        """The tensor `name` of the merged model."""
        weight = self._base.get(name)
        dtype, key = weight.dtype, self._adapters.whole.get(name)
        if key is not None:
            weight = self._adapters.get(key)
        pair = self._low_rank.get(name)
        if pair is None:
            return weight.to(dtype)
        if pair.experts and pair.expert is None:
            return torch.stack([self._merged(weight[e], pair, e).to(dtype) for e in range(pair.experts)])
        return self._merged(weight, pair, pair.expert).to(dtype)

    def source(self, name: str) -> str:
        """The base's file that holds `name`; where its adapters are too."""
        changed = name in self._low_rank or name in self._adapters.whole
        return self._base.source(name) + (f" with {self._adapters.file}" if changed else "")

    def _merged(self, weight: Tensor, pair: LowRank, expert: int | None) -> Tensor:
        """float32: one matrix with its product added, and with DoRA its rows as long as they were learned to be."""
        product = _product(self._adapters.get(pair.a), self._adapters.get(pair.b), pair, expert)
        whole = (weight.t() if pair.transposed else weight).float() + pair.scale * product
        if pair.lengths is not None:
            lengths = whole.square().sum(1, dtype=torch.float64).sqrt().float()
            whole = whole * (self._adapters.get(pair.lengths).float() / lengths)[:, None]
        return whole.t().contiguous() if pair.transposed else whole


def _product(a: Tensor, b: Tensor, pair: LowRank, expert: int | None) -> Tensor:
    """float32 [out, in]: B A."""
    if expert is not None:
        a = a.unflatten(0, (pair.experts, -1))[expert]
        b = b.unflatten(1, (-1, pair.experts))[:, :, expert]
    if pair.rows is not None:
        b = b[slice(*pair.rows)]
    return b.float() @ a.float()


def open_weights(folder: str | Path) -> SafetensorsReader | MergedReader:
    """The weights of a Hugging Face folder, or of one that `link_merged` made. Raises InputError."""
    found = merged_of(Path(folder))
    return SafetensorsReader(folder) if found is None else MergedReader(*found)


def merged_of(folder: Path) -> tuple[Path, Path] | None:
    """Base and adapters whose merged weights are the folder's; None: it has weights of its own."""
    base, adapter = folder / BASE, folder / ADAPTER
    return (base.resolve(), adapter.resolve()) if base.is_symlink() and adapter.is_symlink() else None


def link_merged(folder: Path, base: Path, adapter: Path) -> None:
    """Make the weights of `folder`, which has a configuration, those of `base` with `adapter` merged."""
    for name, target in ((BASE, base), (ADAPTER, adapter)):
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(target.resolve(), target_is_directory=True)


def merged_tensors(base: Path, adapter: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the merged model, one at a time."""
    with MergedReader(base, adapter) as reader:
        for name in reader.keys():
            yield name, reader.get(name)
