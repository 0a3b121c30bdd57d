"""How a worker's end is explained: what it can say before it ends, and what its silence means.

A process that is killed by SIGKILL says nothing; every other end (a fatal signal, `os._exit`) leaves a line in its log.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import traceback
from pathlib import Path
from typing import NoReturn

_EXIT_MARK = "nrl: this process called os._exit"
_EXIT = re.compile(re.escape(_EXIT_MARK) + r"\((-?\d+)\)")
_CRASH = re.compile(r"\*\*\* SIG\w+ received|Fatal Python error: ")
"""Where Ray's report of a fatal signal begins, or Python's."""
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SILENT = "connection error code 2"
"""Ray's words for a worker whose socket closed without a goodbye."""
_TAIL_LINES = 30
_BEFORE_CRASH = 10
_TAIL_BYTES = 1 << 16
DRIVER_SIGNALS = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that only the driver answers; Ray's daemons are started with these blocked."""
_VMSTAT = Path("/proc/vmstat")


def install() -> None:
    """Make this process write its last words to stderr."""
    faulthandler.enable(file=2, all_threads=True)
    owner, leave = os.getpid(), os._exit

    def exit_with_words(status: int) -> NoReturn:
        if os.getpid() == owner:  # a forked child ends this way as a rule
            stack = "".join(traceback.format_stack()[:-1])
            os.write(2, f"{_EXIT_MARK}({status})\n{stack}".encode())
        leave(status)

    os._exit = exit_with_words


def unblock_signals() -> None:
    """Undo, in this thread, the mask that Ray's daemons inherit from the driver; child processes inherit it too."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *DRIVER_SIGNALS})


def exit_cause(log: str, detail: str, *, node: str, oom_kills_before: int) -> str:
    """Why a worker ended, from its log since its start and from Ray's own text."""
    exits, fatal = _EXIT.findall(log), _FATAL.findall(log)
    if exits:
        return f"called os._exit({exits[-1]}): {detail}"
    if fatal:
        return f"crashed ({fatal[-1]}): {detail}"
    if _SILENT not in detail:
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
    """The last 30 lines; after a crash, the lines around its start, since the stacks of all threads follow it."""
    lines = log.splitlines()
    crash = next((i for i, line in enumerate(lines) if _CRASH.search(line)), None)
    if crash is not None:
        lines = lines[: max(0, crash - _BEFORE_CRASH) + _TAIL_LINES]
    return "\n".join(lines[-_TAIL_LINES:])
