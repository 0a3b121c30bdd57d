"""A teacher's likeliest tokens on disk: a folder of safetensors files, one for each run of conversations, beside a manifest.

A shard holds `tokens` int32 [T], the trained tokens of its conversations end to end; `ids` int32 and `logprobs` float32 [T, K] at
these places; and `cu_tokens` int64 [count + 1], where each conversation starts. The manifest is written last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.files import atomic_write, fsync_folder, sha256_file
from nemo_rl_like.tensors.shards import write_shard

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class LogitsOrigin:
    """What stored log-probs depend on: a `distill` stage must have the same."""

    data: str
    """Hash of the conversations."""
    tokenizer: str
    """Hash of the tokenizer and its chat template."""
    teachers: tuple[str, ...]
    """Hash of each teacher's folder, after its domain; empty where a stage names none."""
    top_k: int
    """Tokens at each place."""
    temperature: float
    """What divided the logits."""
    max_tokens: int
    """Context, in tokens; longer rows are not there."""

    def check(self, stored: LogitsOrigin, folder: Path) -> None:
        """Raises InputError naming both values of each thing that differs."""
        wrong = [
            f"{field.name} is {_short(getattr(self, field.name))} here and {_short(getattr(stored, field.name))} there"
            for field in fields(self)
            if getattr(self, field.name) != getattr(stored, field.name)
            and not (field.name == "teachers" and not self.teachers)
        ]
        if wrong:
            raise InputError(
                f"`data.stored_logits` {folder} was written for another run: {'; '.join(wrong)}; use what it was written with, or "
                "write it anew with a `teacher_logits` stage"
            )


@dataclass(frozen=True, slots=True)
class Told:
    """What a teacher said of one conversation's T trained tokens."""

    tokens: Tensor
    """int32 [T] the tokens."""
    ids: Tensor
    """int32 [T, K]"""
    logprobs: Tensor
    """float32 [T, K]"""


class StoredLogits:
    """The log-probs in a folder, read when asked for. Raises InputError when it is no whole folder of a `teacher_logits` stage."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        manifest = _read_manifest(self._folder)
        self.origin = manifest.origin
        self._per_shard = manifest.examples_per_shard
        self._paths = manifest.paths
        self._open: dict[int, safe_open] = {}

    def of(self, index: int) -> Told:
        """What stands there for conversation `index` of the file. Raises InputError for a damaged shard."""
        number, place = divmod(index, self._per_shard)
        try:
            shard = self._shard(number)
            start, end = shard.get_slice("cu_tokens")[place : place + 2].tolist()
            return Told(*(shard.get_slice(name)[start:end] for name in ("tokens", "ids", "logprobs")))
        except (SafetensorError, OSError, IndexError, ValueError) as error:
            raise InputError(
                f"{self._folder}: conversation {index} cannot be read: {error}; write the folder anew"
            ) from error

    def _shard(self, number: int) -> safe_open:
        if number not in self._open:
            self._open[number] = safe_open(self._folder / self._paths[number], framework="pt")
        return self._open[number]


def shard_path(number: int) -> str:
    """Name of a shard's file."""
    return f"logits-{number:05d}.safetensors"


def write_logits(folder: Path, number: int, told: Told, counts: Tensor) -> None:
    """Write shard `number`: `told` of all its conversations end to end, `counts` int64 [conversations] their trained tokens.

    A reader sees no file or the whole one, also after a crash.
    """
    cu_tokens = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=cu_tokens[1:])
    temporary = f".tmp-{shard_path(number)}"
    tensors = {"tokens": told.tokens, "ids": told.ids, "logprobs": told.logprobs, "cu_tokens": cu_tokens}
    write_shard(folder, temporary, {name: tensor.contiguous() for name, tensor in tensors.items()})
    (folder / temporary).replace(folder / shard_path(number))
    fsync_folder(folder)


def write_manifest(folder: Path, origin: LogitsOrigin, shards: int, examples_per_shard: int) -> None:
    """Write the manifest of a folder whose shards are there."""
    files = [folder / shard_path(number) for number in range(shards)]
    content = {
        "format": FORMAT,
        "origin": asdict(origin),
        "examples_per_shard": examples_per_shard,
        "shards": [{"path": f.name, "size": f.stat().st_size, "sha256": sha256_file(f)} for f in files],
    }
    atomic_write(folder / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())


def extras_of(told: Sequence[Told], tokens: Tensor, mask: Tensor, source: str) -> dict[str, Tensor]:
    """`teacher_ids` int32 and `teacher_logprobs` float32 [N, K] of a batch, whose conversations in order are `told`; 0 where not trained.

    Args: the batch's `tokens` int64 and loss `mask` bool [N]. Raises InputError when these are not the tokens that were stored.
    """
    stored = torch.cat([t.tokens for t in told])
    if not torch.equal(stored.long(), tokens[mask]):
        raise InputError(
            f"{source}: the stored log-probs are of other tokens ({stored.numel()}, the batch trains {int(mask.sum())}); write them "
            "anew with a `teacher_logits` stage"
        )
    out = {}
    for name, values in (("teacher_ids", [t.ids for t in told]), ("teacher_logprobs", [t.logprobs for t in told])):
        whole = torch.cat(values)
        out[name] = whole.new_zeros(mask.numel(), whole.shape[1])
        out[name][mask] = whole
    return out


@dataclass(frozen=True, slots=True)
class _Manifest:
    origin: LogitsOrigin
    examples_per_shard: int
    paths: tuple[str, ...]


def _read_manifest(folder: Path) -> _Manifest:
    file = folder / MANIFEST
    if not file.is_file():
        raise InputError(
            f"`data.stored_logits` is {str(folder)!r}, which has no {MANIFEST} (looked in {Path.cwd()}); give the folder `logits` that a "
            "finished `teacher_logits` stage wrote"
        )
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        origin = LogitsOrigin(**{**raw["origin"], "teachers": tuple(raw["origin"]["teachers"])})
        shards = [(str(shard["path"]), int(shard["size"])) for shard in raw["shards"]]
        manifest = _Manifest(origin, int(raw["examples_per_shard"]), tuple(path for path, _ in shards))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: is no manifest of stored log-probs ({error}); write the folder anew") from error
    if raw["format"] != FORMAT:
        raise InputError(f"{file}: has format {raw['format']}, and this version reads {FORMAT}; write the folder anew")
    for path, size in shards:
        found = (folder / path).stat().st_size if (folder / path).is_file() else None
        if found != size:
            raise InputError(f"{folder / path}: has {found} bytes, the manifest says {size}; copy the folder again")
    return manifest


def _short(value: object) -> str:
    """A value for people: hashes by their first twelve characters."""
    if isinstance(value, tuple):
        return ", ".join(_short(item) for item in value) or "none"
    name, _, digest = str(value).rpartition(":")
    return f"{name}{':' if name else ''}{digest[:12]}" if isinstance(value, str) else str(value)
