"""Lines of growing log files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_POLL_S = 0.5


def lines(files: Callable[[], Sequence[Path]], *, follow: bool, ended: Callable[[], bool]) -> Iterator[str]:
    """The files' lines without their ends; with `follow` those that come later, until `ended()` and all was read.

    Several files are read in turn, each line under its file's name.
    """
    at: dict[Path, int] = {}
    rest: dict[Path, bytes] = {}
    while True:
        last = not follow or ended()
        for path in files():
            prefix = f"{path.stem}: " if len(files()) > 1 else ""
            with path.open("rb") as stream:
                stream.seek(at.get(path, 0))
                data = rest.get(path, b"") + stream.read()
                at[path] = stream.tell()
            *whole, rest[path] = data.split(b"\n")
            if last and rest[path]:
                whole.append(rest.pop(path))
            yield from (prefix + line.decode(errors="replace") for line in whole)
        if last:
            return
        time.sleep(_POLL_S)
