"""Ends what a dead driver leaves behind. Standard library only: it also runs as a script of its own.

`python -I -S watchdog.py DRIVER_PID DRIVER_START RUN_ID TEMP_DIR` leaves the driver's process tree, prints its process
id, and waits until the driver has ended or sends SIGUSR1. Then it kills every process of the run and removes their shared-memory segments
and Ray's temporary folder. A process belongs to the run if its environment holds `NRL_RUN_ID=<run id>`, its command line
names the temporary folder, or such a process is its parent: one that renames itself overwrites its environment.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

RUN_ID_ENV = "NRL_RUN_ID"
_START_SECONDS = 60.0
_PASS_SECONDS = 0.2
_LOOK_SECONDS = 10.0
"""How often the segments in use are noted while the driver lives: their owners may die before its end is seen."""
_SETTLE_SECONDS = 0.1
"""A new segment is mapped this long after it was made."""
_IN_CREATE = 0x100
_PROC = Path("/proc")
_SHARED = "/dev/shm/"
_STATE, _PARENT, _STARTED = 0, 1, 19
"""Index of `state`, `ppid` and `starttime` among the fields of /proc/<pid>/stat that follow the command's name
(proc_pid_stat(5))."""
_INODE = 4
"""Index of `inode` among the fields of /proc/<pid>/maps."""


def start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if it has ended. With the id it names one process."""
    fields = _stat_fields(_PROC / str(pid))
    return fields[_STARTED] if fields else ""


def processes_of_run(run_id: str, temp_dir: str) -> set[int]:
    """Ids of the live processes that belong to the run; never this process, never zombies."""
    marks = (f"{RUN_ID_ENV}={run_id}".encode(), temp_dir.encode())
    processes = _all_processes()
    found = {pid for pid in processes if _belongs(_PROC / str(pid), *marks)}
    children: dict[int, list[int]] = {}
    for pid in processes:
        fields = _stat_fields(_PROC / str(pid))
        if fields and fields[_STATE] != "Z":
            children.setdefault(int(fields[_PARENT]), []).append(pid)
    waiting = list(found)
    while waiting:
        young = set(children.get(waiting.pop(), [])) - found
        found |= young
        waiting += young
    return found - {os.getpid()}


def segments_of(pids: Iterable[int]) -> set[str]:
    """Paths of the named shared memory and semaphores that these processes have mapped.

    Found by inode: a semaphore is mapped before it has its name (sem_open(3)).
    """
    inodes: set[int] = set()
    for pid in pids:
        try:
            lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
        inodes.update(int(line.split(None, 5)[_INODE]) for line in lines if _SHARED in line)
    return {
        os.path.join(folder, entry.name)
        for folder, _, _ in os.walk(_SHARED)
        for entry in os.scandir(folder)
        if entry.inode() in inodes
    }


def command_line(pid: int) -> str:
    """A process's arguments, separated by spaces; empty if it has ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int) -> None:
    """SIGKILL a process, if it is still there and ours."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def start(run_id: str, temp_dir: str) -> int:
    """Start a watchdog over this process; returns its id. Raises CalledProcessError, TimeoutExpired when it cannot start."""
    me = os.getpid()
    started = subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(me), start_time(me), run_id, temp_dir],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", "")},
        timeout=_START_SECONDS,
        check=True,
    )
    return int(started.stdout)


def finish(pid: int, seconds: float) -> None:
    """Ask the watchdog with this id to clean up now, and wait until it has; returns at once if it is gone."""
    if __file__ not in command_line(pid):
        return
    handle = os.pidfd_open(pid)
    signal.pidfd_send_signal(handle, signal.SIGUSR1)
    select.select([handle], [], [], seconds)
    os.close(handle)


def kill_run(
    run_id: str,
    temp_dir: str,
    *,
    segments: Iterable[str] = (),
    seconds: float = 15.0,
) -> set[int]:
    """SIGKILL the run's processes, again and again until none is left; returns those left after `seconds`.

    Then removes the shared-memory segments that they had mapped (and `segments`), unless somebody else maps them.
    """
    deadline = time.monotonic() + seconds
    known = set(segments)
    while True:
        left = processes_of_run(run_id, temp_dir)
        known |= segments_of(left)
        for pid in left:
            kill(pid)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(_PASS_SECONDS)
    if known:
        for path in known - segments_of(_all_processes()):
            Path(path).unlink(missing_ok=True)
    return left


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _stat_fields(proc: Path) -> list[str]:
    try:
        return (proc / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _belongs(proc: Path, env_mark: bytes, temp_dir: bytes) -> bool:
    if _stat_fields(proc)[:1] in ([], ["Z"]):
        return False
    try:
        if env_mark in (proc / "environ").read_bytes().split(b"\0"):
            return True
        command = (proc / "cmdline").read_bytes()
    except OSError:  # it ended while we looked, or belongs to somebody else
        return False
    return temp_dir in command and __file__.encode() not in command  # the run's watchdog ends by itself


def _wait_for_end(pid: int, started: str, run_id: str, temp_dir: str) -> set[str]:
    """Return when the driver has ended or asks us to finish: the segments that the run was seen to use."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return set()
    asked, made = _watch_for_finish(), _watch_for_segments()
    os.write(1, f"{os.getpid()}\n".encode())
    os.close(1)
    segments: set[str] = set()
    while start_time(pid) == started:  # otherwise the driver is gone and its id somebody else's
        ready, _, _ = select.select([handle, asked, *made], [], [], _LOOK_SECONDS)
        if handle in ready or asked in ready:
            break
        if ready:
            time.sleep(_SETTLE_SECONDS)
            os.read(made[0], 1 << 16)
        segments |= segments_of(processes_of_run(run_id, temp_dir))
    return segments


def _watch_for_finish() -> int:
    """A handle that is readable once SIGUSR1 has come."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    return reader


def _watch_for_segments() -> list[int]:
    """A handle that is readable when a segment was made (inotify(7)); none where the kernel gives no more of them."""
    libc = ctypes.CDLL(None)
    handle = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if handle < 0 or libc.inotify_add_watch(handle, _SHARED.encode(), _IN_CREATE) < 0:
        return []
    return [handle]


def _leave_tree() -> None:
    """Become a child of init in a session of its own, so that whoever kills the driver's tree does not end us."""
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main(argv: list[str]) -> int:
    """Wait for the driver's end, then clean up; exit status 0 when nothing is left."""
    driver, started, run_id, temp_dir = int(argv[0]), argv[1], argv[2], argv[3]
    _leave_tree()
    segments = _wait_for_end(driver, started, run_id, temp_dir)
    left = kill_run(run_id, temp_dir, segments=segments)
    shutil.rmtree(temp_dir, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
