"""Safetensors shards: written tensor by tensor with their hash, read lazily.

Format: 8 bytes (little-endian) header length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_rl_like.artifacts import faults
from nemo_rl_like.checkpoint.layout import INDEX, CheckpointError, DiskFull, FileEntry

_CHUNK = 1 << 23
_ALIGN = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)
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

    entry: FileEntry
    """Path relative to the checkpoint folder, size and hash."""
    tensors: tuple[str, ...]
    """Names in it."""
    tensor_bytes: int
    """Bytes of the tensors alone."""


@dataclass(slots=True)
class ShardWriter:
    """Writes named tensors of one section into shards; one writer a process, any number of processes.

    Holds at most one shard (`shard_bytes`, or one larger tensor) in memory. Use as a context manager, then take `files`.
    """

    folder: Path
    """The temporary checkpoint folder that `CheckpointWriter.begin` returned."""
    section: str
    """`weights` or `optimizer`."""
    part: int = 0
    """Number of this writer among those of the section, for example the rank."""
    shard_bytes: int = 1 << 29
    """Largest shard, in bytes of tensors."""
    files: list[ShardFile] = field(default_factory=list)
    """Shards written so far."""
    _held: dict[str, Tensor] = field(default_factory=dict)
    _held_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it must not change before the next `add` or `close` returns.

        Raises CheckpointError for a type safetensors lacks or a name given twice, DiskFull when the disk is full.
        """
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"tensor {name!r} has type {tensor.dtype}, which safetensors cannot hold")
        if name in self._held:
            raise CheckpointError(f"tensor {name!r} was given twice")
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self.shard_bytes:
            self._flush()
        self._held[name] = tensor.detach().to("cpu")
        self._held_bytes += size

    def close(self) -> tuple[ShardFile, ...]:
        """Write what is left; returns every shard of this writer."""
        if self._held:
            self._flush()
        return tuple(self.files)

    def _flush(self) -> None:
        name = f"{self.section}/model-{self.part:05d}-{len(self.files):05d}.safetensors"
        with disk_full_named(self.folder, f"a shard of {self._held_bytes} bytes"):
            entry = _write_shard(self.folder, name, self._held, self._held_bytes)
        self.files.append(ShardFile(entry, tuple(self._held), self._held_bytes))
        self._held.clear()
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


@contextmanager
def disk_full_named(folder: Path, what: str) -> Iterator[None]:
    """Turn the operating system's "no space left" into DiskFull that names folder, need and free bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        raise DiskFull(
            f"the disk of {folder.parent} is full ({error.strerror}): writing {what} failed, {free} bytes are free; free "
            "space, move `output` to a larger disk or lower `checkpoint.keep_last`. Earlier checkpoints are untouched"
        ) from error


def _write_shard(folder: Path, name: str, tensors: Mapping[str, Tensor], total: int) -> FileEntry:
    path = folder / name
    with path.open("wb") as file:
        out = _HashedFile(file)
        out.write(_header(tensors))
        written, half_done = 0, False
        for tensor in tensors.values():
            raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(raw), _CHUNK):
                piece = raw[start : start + _CHUNK]
                out.write(piece)
                written += len(piece)
                if not half_done and 2 * written >= total:
                    half_done = True
                    file.flush()
                    faults.point("checkpoint.mid_shard")
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name, out.size, out.digest.hexdigest())


class _HashedFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = text.ljust(math.ceil(len(text) / _ALIGN) * _ALIGN)
    return len(padded).to_bytes(8, "little") + padded


def index_json(shards: list[ShardFile]) -> bytes:
    """Hugging Face's index of a section: which shard holds which tensor. Raises CheckpointError for a name in two shards."""
    weight_map: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in weight_map:
                raise CheckpointError(f"tensor {name!r} is in {weight_map[name]} and in {shard.entry.path}")
            weight_map[name] = shard.entry.path.rpartition("/")[2]
    total = sum(shard.tensor_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=1) + "\n").encode()


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of one section, each read from its memory-mapped shard when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """`folder` is a section's. Raises CheckpointError if its index cannot be read."""
        self._folder = folder
        try:
            weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / INDEX} cannot be read: {type(error).__name__}: {error}") from error
        self._files: dict[str, str] = dict(weight_map)

    def __getitem__(self, name: str) -> Tensor:
        path = self._folder / self._files[name]
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                return shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"tensor {name!r} cannot be read from {path}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
