"""Hugging Face model folders: reading safetensors tensor by tensor, and writing them shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)


class TensorReader(Protocol):
    """Named tensors in Hugging Face names and shapes, read one at a time."""

    def keys(self) -> Sequence[str]:
        """Every tensor's name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the tensor."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        ...

    def source(self, name: str) -> str:
        """Where the tensor is, for messages."""
        ...


class SafetensorsReader:
    """The tensors of a Hugging Face folder (`model.safetensors`, or shards with an index), mapped, not loaded.

    Every shard's header is checked when the reader is made. Raises InputError naming the file and the tensor that is missing or
    damaged. Close it, or use it as a context manager.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise InputError(f"{self._folder} is not a folder; expected a Hugging Face model folder with {SINGLE}")
        self._file_of = self._locate()
        self._open = {name: self._open_shard(name) for name in sorted(set(self._file_of.values()))}
        self._check_index()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap every shard; tensors read before stay valid."""
        self._open.clear()

    def keys(self) -> Sequence[str]:
        """Every tensor's name, sorted."""
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name` from the shard's header."""
        return tuple(self._shard(name).get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        """The tensor `name`, mapped from its shard."""
        try:
            tensor: Tensor = self._shard(name).get_tensor(name)
        except (SafetensorError, RuntimeError) as error:
            raise InputError(f"{self.source(name)}: tensor {name!r} cannot be read: {error}") from error
        return tensor

    def source(self, name: str) -> str:
        """Path of the shard that holds `name`, or of the folder if none does."""
        file = self._file_of.get(name)
        return str(self._folder / file if file else self._folder)

    def _shard(self, name: str) -> safe_open:
        if name not in self._file_of:
            raise InputError(f"{self._folder} has no tensor {name!r}")
        return self._open[self._file_of[name]]

    def _locate(self) -> dict[str, str]:
        index = self._folder / INDEX
        if index.is_file():
            return _read_index(index)
        if (self._folder / SINGLE).is_file():
            return dict.fromkeys(self._open_shard(SINGLE).keys(), SINGLE)
        found = sorted(p.name for p in self._folder.iterdir())[:8]
        raise InputError(
            f"{self._folder} has neither {SINGLE} nor {INDEX} (it has {found}); "
            "save the model with save_pretrained(..., safe_serialization=True)"
        )

    def _open_shard(self, file: str) -> safe_open:
        path = self._folder / file
        if not path.is_file():
            raise InputError(f"{path} does not exist, but {INDEX} lists it; copy the missing shard")
        try:
            return safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise InputError(f"{path} is not a whole safetensors file: {error}; copy it again") from error

    def _check_index(self) -> None:
        held = {file: set(shard.keys()) for file, shard in self._open.items()}
        lost = sorted(name for name, file in self._file_of.items() if name not in held[file])
        if lost:
            raise InputError(f"{self.source(lost[0])} lacks tensors that {INDEX} says it has: {_some(lost)}")


class ShardWriter:
    """Collects tensors and writes a shard whenever `shard_bytes` are full; at most one shard is in memory.

    Files get their final names (`model-00001-of-00003.safetensors`, or `model.safetensors` alone) and the index when closed.
    """

    def __init__(self, folder: str | Path, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes is {shard_bytes}; must be positive")
        self._folder, self._limit = Path(folder), shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._written: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor. Raises ValueError if `name` was added before."""
        if name in self._pending or any(name in names for names in self._written):
            raise ValueError(f"tensor {name!r} was written twice")
        if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous().clone()
        self._pending_bytes += tensor.nbytes

    def close(self) -> list[Path]:
        """Write what is left, name the shards and write the index; returns the files, none if no tensor was added."""
        if self._pending:
            self._flush()
        count = len(self._written)
        files: list[Path] = []
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._written):
            file = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._part(i).replace(self._folder / file)
            files.append(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            files.append(self._folder / INDEX)
        return files

    def _flush(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file(self._pending, self._part(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _part(self, i: int) -> Path:
        return self._folder / f".part-{i:05d}.safetensors"


def write_hf_folder(
    folder: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor | None]],
    tokenizer_folder: str | Path | None,
    shard_bytes: int,
) -> list[Path]:
    """Write a folder that transformers loads: config, safetensors shards, and the tokenizer files of `tokenizer_folder`.

    `tensors` may be the collective `WeightMap.iter_hf`: every rank must call this, and only the one that receives tensors writes.
    Returns the weight files written (none on the other ranks).
    """
    writer = ShardWriter(folder, shard_bytes)
    dtype = torch.float32
    for name, tensor in tensors:
        if tensor is not None:
            dtype = tensor.dtype
            writer.add(name, tensor)
    files = writer.close()
    if files:
        text = json.dumps(config.to_hf_dict(str(dtype).removeprefix("torch.")), indent=2)
        (Path(folder) / "config.json").write_text(text + "\n", encoding="utf-8")
        if tokenizer_folder is not None:
            _copy_tokenizer(Path(tokenizer_folder), Path(folder))
    return files


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{path} has no `weight_map` from tensor names to file names")
    return names


def _some(names: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
