"""A scheduler's signals while `nrl node` is imported and reads its spec: they wait until it answers them."""

from __future__ import annotations

import signal

ANSWERED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""What asks a host to save and end."""


def hold() -> None:
    """Let signals to this thread, and to those it starts, wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ANSWERED)


def release() -> None:
    """Deliver what waited, and what comes."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ANSWERED)
