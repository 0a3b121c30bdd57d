"""Hugging Face model folders: reading safetensors tensor by tensor, and writing them shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.tensors.shards import INDEX, ShardFile, ShardWriter, index_json, write_shard

SINGLE = "model.safetensors"
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

    def __init__(self, folder: str | Path, single: str = SINGLE) -> None:
        """`single`: the file to read where that is not the model's own."""
        self._folder = Path(folder)
        self._single = single
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
        if self._single == SINGLE and index.is_file():
            return read_index(index)
        if (self._folder / self._single).is_file():
            return dict.fromkeys(self._open_shard(self._single).keys(), self._single)
        found = sorted(p.name for p in self._folder.iterdir())[:8]
        raise InputError(
            f"{self._folder} has neither {self._single} nor {INDEX} (it has {found}); "
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
            raise InputError(f"{self.source(lost[0])} lacks tensors that {INDEX} says it has: {some(lost)}")


def write_weights(folder: str | Path, tensors: Iterable[tuple[str, Tensor | None]], shard_bytes: int) -> list[Path]:
    """Write `model.safetensors`, or `model-00001-of-00003.safetensors` and the like with an index, to `folder`.

    At most one shard of `shard_bytes` is in memory. Returns the files: none, and no folder, if no tensor came.
    Raises ValueError for a name that comes twice.
    """
    target = Path(folder)

    def write(index: int, held: Mapping[str, Tensor]) -> ShardFile:
        target.mkdir(parents=True, exist_ok=True)
        return write_shard(target, f".part-{index:05d}.safetensors", held)

    with ShardWriter(write, shard_bytes) as writer:
        for name, tensor in tensors:
            if tensor is not None:
                writer.add(name, tensor)
    return name_shards(target, writer.files)


def name_shards(folder: Path, parts: Sequence[ShardFile]) -> list[Path]:
    """Give the shards the names that say how many there are, and write the index if there are several."""
    count = len(parts)
    named = [
        replace(part, path=SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors")
        for i, part in enumerate(parts)
    ]
    for part, shard in zip(parts, named, strict=True):
        (folder / part.path).replace(folder / shard.path)
    files = [folder / shard.path for shard in named]
    if count > 1:
        (folder / INDEX).write_bytes(index_json(named))
        files.append(folder / INDEX)
    return files


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
    files = write_weights(folder, tensors, shard_bytes)
    if files:
        with SafetensorsReader(folder) as written:
            dtype = written.get(written.keys()[-1]).dtype
        text = json.dumps(config.to_hf_dict(str(dtype).removeprefix("torch.")), indent=2)
        (Path(folder) / "config.json").write_text(text + "\n", encoding="utf-8")
        if tokenizer_folder is not None:
            copy_tokenizer(Path(tokenizer_folder), Path(folder))
    return files


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files of a Hugging Face folder."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def read_index(path: Path) -> dict[str, str]:
    """File name by tensor name. Raises InputError if it is no index."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{path} has no `weight_map` from tensor names to file names")
    return names


def some(names: Sequence[str], limit: int = 10) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
