"""The driver of a job: `nrl run SPEC --resume` as a child of `nrl node`, told of signals and of lost hosts."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from nemo_rl_like.artifacts.errors import StoppedBySignal

logger = logging.getLogger(__name__)

_DECIDED = (0, 2, StoppedBySignal.exit_code)
"""Exit codes that no signal to a worker makes: done, a spec that is wrong, saved."""
_SAVE_S = 60.0
"""What a driver gets to save after a host was lost, before it is killed, in seconds."""


class Driver:
    """A running driver. Signals are passed on one by one: the second of a kind ends it without saving."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], *, lost_after_s: float) -> None:
        """Start `nrl` with these arguments; its output is this process's. `lost_after_s`: see `lose`."""
        command = [sys.executable, "-m", "nemo_rl_like", *arguments]
        self._process = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True)
        self._told: set[int] = set()
        self._lost_at: float | None = None
        self._grace_s = lost_after_s

    def poll(self) -> int | None:
        """Exit code, once the driver has ended: its own, or 128 + n after signal n."""
        if self._process.poll() is None:
            self._press()
            return None
        return self._own

    def job_code(self, *, reach_workers: bool) -> int:
        """Exit code for this job, once the driver has ended: that of `poll`, or 75 where a signal that was passed on ended it.

        Args:
            reach_workers: the scheduler may send SIGTERM to every process of a job, so that a driver that failed after it has lost its workers to it.
        """
        own = self._own
        if self._lost_at is not None:
            return own
        if -self._process.returncode in self._told:
            return StoppedBySignal.exit_code
        if reach_workers and signal.SIGTERM in self._told and own not in _DECIDED:
            logger.warning(
                "the driver ended with exit code %d after SIGTERM, which may have reached its workers: that is a stop",
                own,
            )
            return StoppedBySignal.exit_code
        return own

    @property
    def _own(self) -> int:
        """Exit code of the driver that has ended, as a shell tells it."""
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def tell(self, number: int) -> None:
        """Pass a signal on."""
        logger.info("signal %s goes to the driver, which saves", signal.Signals(number).name)
        self._told.add(number)
        self._process.send_signal(number)  # nothing where it has ended

    def lose(self, why: str) -> None:
        """A host of the job is gone: the driver gets `lost_after_s` to find out by itself, then a minute to save, then it is killed."""
        logger.error("%s", why)
        if self._lost_at is None:
            self._lost_at = time.monotonic()

    def _press(self) -> None:
        if self._lost_at is None:
            return
        waited = time.monotonic() - self._lost_at
        if waited > self._grace_s + _SAVE_S:
            self._process.kill()
        elif waited > self._grace_s and signal.SIGTERM not in self._told:
            self.tell(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
