"""How a worker's end is explained: what it can say before it ends, and what its silence means.

A process that is killed by SIGKILL says nothing; every other end (a fatal signal, `os._exit`) leaves a line in its log.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import threading
import traceback
from pathlib import Path

_EXIT_MARK = "nrl: this process called os._exit"
_EXIT = re.compile(re.escape(_EXIT_MARK) + r"\((-?\d+)\)")
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_TAIL_LINES = 30
_TAIL_BYTES = 16384
_VMSTAT = Path("/proc/vmstat")


def install() -> None:
    """Make this process write its last words to stderr, and survive a SIGTERM that is meant for the driver.

    Must run in the main thread for the latter; the driver ends workers itself once it has saved.
    """
    faulthandler.enable(file=2, all_threads=True)
    owner, leave = os.getpid(), os._exit

    def exit_with_words(status: int) -> None:
        if os.getpid() == owner:  # a forked child ends this way as a rule
            stack = "".join(traceback.format_stack()[:-1])
            os.write(2, f"{_EXIT_MARK}({status})\n{stack}".encode())
        leave(status)

    os._exit = exit_with_words
    unblock_signals()
    if threading.current_thread() is threading.main_thread():
        # A handler, not SIG_IGN: the programs that this process starts then end on SIGTERM as usual.
        signal.signal(signal.SIGTERM, lambda number, frame: None)


def unblock_signals() -> None:
    """Undo, in this thread, the mask that Ray's daemons inherit from the driver; child processes inherit it too."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def exit_cause(log: str, detail: str, *, node: str, oom_kills_before: int) -> str:
    """Why a worker ended, from its log since its start and from Ray's own text."""
    exits, fatal = _EXIT.findall(log), _FATAL.findall(log)
    if exits:
        return f"called os._exit({exits[-1]}): {detail}"
    if fatal:
        return f"crashed ({fatal[-1]}): {detail}"
    if "worker process has died" not in detail:
        return detail
    killed = oom_kills() - oom_kills_before if node == socket.gethostname() else 0
    if killed > 0:
        return f"was probably killed for memory: the kernel's out-of-memory killer ended {killed} processes: {detail}"
    return f"was killed by SIGKILL, or left native code without a word: {detail}"


def oom_kills() -> int:
    """Processes that this host's kernel has ended for lack of memory since it started; 0 where it does not say."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def read_log(path: str, start: int) -> str:
    """The end of a worker's log, from byte `start` on; empty if it is not readable here."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            stream.seek(max(start, file.stat().st_size - _TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def tail(log: str) -> str:
    """The last 30 lines."""
    return "\n".join(log.splitlines()[-_TAIL_LINES:])
