"""Content hashes: what a stage's key and an artifact's identity are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.files import sha256_file

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]

EDGE_BYTES = 1 << 20


def canonical_json(value: JSON) -> str:
    """One text for one value: keys sorted, no spaces, non-ASCII kept; NaN and infinity raise ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def hash_json(value: JSON) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def hash_path(path: Path) -> str:
    """SHA-256 (hex) over the content of a file, or over names and contents of all files below a folder.

    Times, owners and empty folders do not count; a symbolic link counts as what it points to.

    Raises:
        InputError: `path` does not exist.
    """
    if path.is_file():
        return sha256_file(path)
    return hash_json([[name, sha256_file(path / name)] for name in _files_below(path)])


def fingerprint_path(path: Path) -> str:
    """SHA-256 (hex) over names, sizes and the first and last MiB of all files below a folder (or of one file).

    For model folders: reading 140 GB at each start would take minutes. A change that keeps a file's size and both of its
    edges is not seen; training or conversion never makes one.

    Raises:
        InputError: `path` does not exist.
    """
    if path.is_file():
        return hash_json(_edges(path))
    return hash_json([[name, _edges(path / name)] for name in _files_below(path)])


def _files_below(folder: Path) -> list[str]:
    """Relative POSIX names of the files below `folder`, sorted."""
    if not folder.is_dir():
        raise InputError(f"{folder} does not exist; its content was to be hashed. Check the path")
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _edges(path: Path) -> list[str | int]:
    """Size of a file and the hash of its first and last MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(EDGE_BYTES))
        if size > EDGE_BYTES:
            file.seek(max(EDGE_BYTES, size - EDGE_BYTES))
            digest.update(file.read())
    return [size, digest.hexdigest()]
