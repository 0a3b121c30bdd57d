"""The one writer of sharded safetensors: tensor by tensor, hashed while written, on disk when it says so.

Format: 8 bytes (little-endian) header length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
"""Hugging Face's name of the file that says which shard holds which tensor."""
CHUNK = 1 << 23
"""Bytes read, hashed or written at once."""
_ALIGN = 8
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard that was written, fsynced and hashed."""

    path: str
    """POSIX path relative to the folder that it was written into."""
    size: int
    """Bytes of the file."""
    sha256: str
    """SHA-256 (hex) of the file."""
    tensors: tuple[str, ...]
    """Names in it."""
    tensor_bytes: int
    """Bytes of the tensors alone."""


class ShardWriter:
    """Collects named tensors and hands them to `write(index, tensors)` whenever `shard_bytes` are full.

    Holds at most one shard (`shard_bytes` of tensors, or one larger tensor) in memory. Use as a context manager, then take
    `files`; or call `close`.
    """

    def __init__(self, write: Callable[[int, Mapping[str, Tensor]], ShardFile], shard_bytes: int) -> None:
        """`write` writes shard `index` (from 0), usually by `write_shard`. Raises ValueError for shards of no size."""
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes is {shard_bytes}; must be positive")
        self._write, self._limit = write, shard_bytes
        self.files: list[ShardFile] = []
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._names: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it must not change until a later `add` or `close` has written it.

        Raises ValueError for a type that safetensors lacks or a name that was added before.
        """
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has type {tensor.dtype}, which safetensors cannot hold")
        if name in self._names:
            raise ValueError(f"tensor {name!r} was written twice")
        if self._held and self._held_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._names.add(name)
        self._held[name] = tensor.detach().to("cpu")
        self._held_bytes += tensor.nbytes

    def close(self) -> tuple[ShardFile, ...]:
        """Write what is left; returns every shard of this writer."""
        if self._held:
            self._flush()
        return tuple(self.files)

    def _flush(self) -> None:
        self.files.append(self._write(len(self.files), self._held))
        self._held, self._held_bytes = {}, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def write_shard(
    folder: Path, path: str, tensors: Mapping[str, Tensor], halfway: Callable[[], None] | None = None
) -> ShardFile:
    """Write CPU `tensors` to the file `path` (relative, POSIX) of `folder`, and fsync it.

    `halfway` is called once, when half of the tensors' bytes are in the file. Raises OSError.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    with (folder / path).open("wb") as file:
        out = HashedFile(file)
        out.write(header_of((name, DTYPES[t.dtype], tuple(t.shape), t.nbytes) for name, t in tensors.items()))
        written = 0
        for tensor in tensors.values():
            raw = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(raw), CHUNK):
                piece = raw[start : start + CHUNK]
                out.write(piece)
                written += len(piece)
                if halfway is not None and 2 * written >= total:
                    file.flush()
                    halfway()
                    halfway = None
        file.flush()
        os.fsync(file.fileno())
    return ShardFile(path, out.size, out.digest.hexdigest(), tuple(tensors), total)


def index_json(shards: Iterable[ShardFile]) -> bytes:
    """Hugging Face's index: which of these shards of one folder holds which tensor.

    Raises ValueError for a name in two shards.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        total += shard.tensor_bytes
        file = shard.path.rpartition("/")[2]
        for name in shard.tensors:
            if name in weight_map:
                raise ValueError(f"tensor {name!r} is in {weight_map[name]} and in {file}")
            weight_map[name] = file
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=1) + "\n").encode()


class HashedFile:
    """A file that is hashed as it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`. Raises OSError."""
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """What stands before the tensors' bytes: (name, type as safetensors names it, shape, bytes) of each, in file order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = text.ljust(math.ceil(len(text) / _ALIGN) * _ALIGN)
    return len(padded).to_bytes(8, "little") + padded
