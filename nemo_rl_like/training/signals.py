"""Asking a run to save and stop: SIGTERM and SIGUSR1 (schedulers), Ctrl-C once; Ctrl-C twice stops at once."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType

from nemo_rl_like.cluster import interrupt

logger = logging.getLogger(__name__)

SAVE_AND_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers that a signal asked to stop; use as a context manager around the step loop, in the main thread."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in SAVE_AND_STOP:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            interrupt.remember(number, frame)
            return
        self.received = signal.Signals(number).name
        logger.warning("%s: will save a checkpoint after this step and stop", self.received)
