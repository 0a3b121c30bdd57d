"""Wall time by part of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "timing/"


class Timings:
    """Adds up wall seconds by part; a part entered twice in a step counts both times."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block as `timing/<name>`, also when it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere, for example by a worker."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def collect(self) -> dict[str, float]:
        """`timing/<part>` -> seconds since the last `collect`, in order of first use; starts again from zero."""
        taken = {f"{PREFIX}{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
