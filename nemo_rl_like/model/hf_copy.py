"""Copies a Hugging Face folder's tensors into shards of another size, byte by byte: a model of any size in a few megabytes of memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_io import SINGLE, name_shards, read_index
from nemo_rl_like.tensors.shards import CHUNK, DTYPES, INDEX, HashedFile, ShardFile, header_of

_MOST_HEADER = 100_000_000
"""Bytes of the longest header that safetensors reads."""
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are."""

    name: str
    file: Path
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    size: int
    """Bytes."""


def stored_tensors(folder: Path, only: str | None = None) -> list[StoredTensor]:
    """Every tensor of the folder (or of the file `only` in it) by name, from the shards' headers.

    Raises InputError naming the file that is missing, cut off or not a safetensors file, or lacks a tensor that the index lists.
    """
    index = folder / INDEX
    if only is not None or not index.is_file():
        return sorted(_read_header(folder / (only or SINGLE)), key=lambda tensor: tensor.name)
    file_of = read_index(index)
    found = {(t.name, file): t for file in sorted(set(file_of.values())) for t in _read_header(folder / file)}
    lost = [(name, file) for name, file in sorted(file_of.items()) if (name, file) not in found]
    if lost:
        raise InputError(f"{folder / lost[0][1]} lacks the tensor {lost[0][0]!r}, which {INDEX} says it has")
    return [found[place] for place in sorted(file_of.items())]


def copy_weights(source: Path, target: Path, shard_bytes: int) -> list[Path]:
    """Write the tensors of the folder `source` to `target` as `write_weights` would; returns the files.

    Raises InputError as `stored_tensors`, OSError.
    """
    shards = _shards(stored_tensors(source), shard_bytes)
    return name_shards(target, [_write(target, i, shard) for i, shard in enumerate(shards)])


def _read_header(file: Path) -> Iterator[StoredTensor]:
    if not file.is_file():
        raise InputError(f"{file} does not exist; copy the missing shard")
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise ValueError(f"its header should have {length} bytes")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        tensors = [_tensor(file, 8 + length, name, entry) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not a whole safetensors file: {error}; copy it again") from error
    end = max((tensor.start + tensor.size for tensor in tensors), default=8 + length)
    if end != size:
        raise InputError(f"{file} has {size} bytes, but its tensors end at byte {end}; copy it again")
    yield from tensors


def _tensor(file: Path, base: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
    start, end = map(int, entry["data_offsets"])
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has the type {dtype}, must be one of {', '.join(_ITEM_BYTES)}")
    if start < 0 or end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name!r} of type {dtype} and shape {list(shape)} cannot have {end - start} bytes")
    return StoredTensor(name, file, dtype, shape, base + start, end - start)


def _shards(tensors: Sequence[StoredTensor], shard_bytes: int) -> list[list[StoredTensor]]:
    """In order, each as full as fits; a tensor larger than a shard has one of its own."""
    shards: list[list[StoredTensor]] = []
    held = 0
    for tensor in tensors:
        if not shards or held + tensor.size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.size
    return shards


def _write(folder: Path, index: int, tensors: Sequence[StoredTensor]) -> ShardFile:
    path = f".part-{index:05d}.safetensors"
    with (folder / path).open("wb") as file:
        out = HashedFile(file)
        out.write(header_of((t.name, t.dtype, t.shape, t.size) for t in tensors))
        for tensor in tensors:
            for piece in pieces(tensor):
                out.write(piece)
        file.flush()
        os.fsync(file.fileno())
    names = tuple(tensor.name for tensor in tensors)
    return ShardFile(path, out.size, out.digest.hexdigest(), names, sum(t.size for t in tensors))


def pieces(tensor: StoredTensor) -> Iterator[bytes]:
    """Its bytes, a few megabytes at a time. Raises InputError if the file ends inside it."""
    left = tensor.size
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        while left:
            piece = stream.read(min(CHUNK, left))
            if not piece:
                raise InputError(f"{tensor.file} ended inside the tensor {tensor.name!r}; copy it again")
            left -= len(piece)
            yield piece
