"""Ends what a dead driver leaves behind. Standard library only: it also runs as a script of its own.

`python -I -S watchdog.py DRIVER_PID RUN_ID TEMP_DIR` waits until the driver has ended, then kills every process of the
run and removes Ray's temporary folder. A process belongs to the run if its environment holds `NRL_RUN_ID=<run id>` or
its command line names the temporary folder.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

RUN_ID_ENV = "NRL_RUN_ID"
_PASS_SECONDS = 0.2


def processes_of_run(run_id: str, temp_dir: str) -> set[int]:
    """Ids of the live processes that belong to the run; never this process, never zombies."""
    marks = (f"{RUN_ID_ENV}={run_id}".encode(), temp_dir.encode())
    mine = os.getpid()
    return {
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != mine and _belongs(entry, *marks)
    }


def _belongs(proc: Path, env_mark: bytes, temp_dir: bytes) -> bool:
    try:
        if (proc / "stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"Z"]:
            return False
        if env_mark in (proc / "environ").read_bytes().split(b"\0"):
            return True
        return temp_dir in (proc / "cmdline").read_bytes()
    except OSError:  # it ended while we looked, or belongs to somebody else
        return False


def command_line(pid: int) -> str:
    """A process's arguments, separated by spaces; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int) -> None:
    """SIGKILL a process, if it is still there and ours."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill_run(run_id: str, temp_dir: str, *, keep: frozenset[int] = frozenset(), seconds: float = 15.0) -> set[int]:
    """SIGKILL the run's processes but `keep`, again and again until none is left; returns those left after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        left = processes_of_run(run_id, temp_dir) - keep
        for pid in left:
            kill(pid)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_PASS_SECONDS)


def _wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if os.getppid() == pid:  # otherwise the driver is gone already and its id may be somebody else's
        select.select([handle], [], [])
    os.close(handle)


def main(argv: list[str]) -> int:
    """Wait for the driver's end, then clean up; exit status 0 when nothing is left."""
    driver, run_id, temp_dir = int(argv[0]), argv[1], argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver's end, not a signal to its group, ends this process
    _wait_for_end(driver)
    left = kill_run(run_id, temp_dir)
    shutil.rmtree(temp_dir, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
