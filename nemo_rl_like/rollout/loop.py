"""An event loop on a thread of its own, which lives as long as the environment processes that it starts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")
_CLOSE_WAIT_S = 30.0


class LoopThread:
    """Runs coroutines for callers that have no event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Result of the coroutine; what it awaits carries the deadlines."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_WAIT_S)
        self._loop.close()
