"""The shards of a checkpoint: written by any number of processes, read lazily."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_rl_like.artifacts import faults
from nemo_rl_like.checkpoint.layout import CheckpointError, DiskFull
from nemo_rl_like.tensors.shards import INDEX, ShardFile, ShardWriter, write_shard

_FULL = (errno.ENOSPC, errno.EDQUOT)


def section_writer(folder: Path, section: str, part: int = 0, shard_bytes: int = 1 << 29) -> ShardWriter:
    """Writer of named tensors of one section; one a process, any number of processes. Its `add` and `close` raise DiskFull.

    `folder` is the temporary folder that `CheckpointWriter.begin` returned; `section` is `weights` or `optimizer`; `part` is
    this writer's number among those of the section, for example the rank; `shard_bytes` is the largest shard, in bytes.
    """

    def write(index: int, tensors: Mapping[str, Tensor]) -> ShardFile:
        path = f"{section}/model-{part:05d}-{index:05d}.safetensors"
        with disk_full_named(folder, f"a shard of {sum(t.nbytes for t in tensors.values())} bytes"):
            return write_shard(folder, path, tensors, halfway=partial(faults.point, "checkpoint.mid_shard"))

    return ShardWriter(write, shard_bytes)


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
