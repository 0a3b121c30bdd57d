"""Ctrl-C while a Ray session is open: remembered, and answered where nothing of Ray is under way.

Python would raise KeyboardInterrupt in the middle of Ray's native calls; cut off there, Ray may crash at exit (seen as SIGSEGV after
Ctrl-C while workers start). A second Ctrl-C is answered at once all the same.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

POLL_S = 0.5
"""Longest wait inside Ray between two looks at `check`, in seconds."""
_asked = False


def install() -> None:
    """Remember Ctrl-C from now on, unless somebody else already answers it or this is not the main thread."""
    global _asked
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _asked = False
        signal.signal(signal.SIGINT, remember)


def uninstall() -> None:
    """Let Python answer Ctrl-C again; one that waits for its answer is forgotten."""
    global _asked
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is remember:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _asked = False


def check() -> None:
    """A safe point. Raises KeyboardInterrupt if Ctrl-C came since `install`."""
    global _asked
    if _asked:
        _asked = False
        raise KeyboardInterrupt


def remember(number: int, frame: FrameType | None) -> None:
    """The signal handler: the first is answered at the next safe point, the second at once."""
    global _asked
    if _asked:
        raise KeyboardInterrupt
    _asked = True
