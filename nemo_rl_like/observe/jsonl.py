"""An append-only JSON-lines file that can be cut back to where a checkpoint left it."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.artifacts.hashing import JSON

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends one object a line. `position()` goes into a checkpoint, `truncate()` undoes what came after it."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, made if missing. Raises OSError if it cannot be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab")

    def append(self, row: Mapping[str, JSON]) -> None:
        """Write one line and hand it to the operating system. A number that is not finite becomes null."""
        text = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False)
        self._file.write(text.encode() + b"\n")
        self._file.flush()

    def position(self) -> int:
        """Bytes written so far, on disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def truncate(self, offset: int) -> None:
        """Cut the file back to `offset` bytes: the lines of steps that will be run again go.

        Raises OutputFolderError if the file is shorter, so that lines before the checkpoint are missing.
        """
        size = self._file.seek(0, os.SEEK_END)
        if size < offset:
            raise OutputFolderError(
                f"{self.path} has {size} bytes, but the checkpoint was written when it had {offset}: lines were removed; "
                "restore the file, or start again with --overwrite"
            )
        if size > offset:
            logger.info("%s: dropping %d bytes written after the checkpoint", self.path, size - offset)
        self._file.truncate(offset)
        self._file.seek(offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> Iterator[Mapping[str, JSON]]:
    """The objects of a JSON-lines file; a last line that was cut by a crash is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _finite(value: JSON) -> JSON:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
