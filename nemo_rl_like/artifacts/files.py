"""Small file habits that several rooms share: hash a file, replace a file in one move, make a folder's entries durable."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, read in pieces of 1 MiB. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (renames, new files). Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def atomic_write(path: Path, data: bytes) -> None:
    """Write `data` so that a reader sees the old file or the whole new one, also after a crash.

    Temporary name beside it, fsync, rename, fsync of the folder. Raises OSError; the temporary file is then removed.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)
