"""Takes the names of vLLM's shared memory out of /dev/shm once every process has it mapped.

vLLM's processes share POSIX memory and semaphores by name, and only a helper process of Python's removes the names when
they die. Ray kills that helper together with them, so that the memory would stay for ever. A mapping needs no name: once
all processes hold it, the name can go, and the kernel frees the memory with its last user.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
_MEMORY, _SEMAPHORE, _RANKS = "psm_", "sem.mp-", "vllm_dist_"
"""How the names begin that Python's multiprocessing gives to shared memory and semaphores, and that vLLM's CPU build
gives to what its tensor-parallel ranks share."""


def descendants(pid: int) -> set[int]:
    """Ids of the live children of process `pid`, their children, and so on.

    Found by parents, not by environment: vLLM renames its processes, which overwrites /proc/<pid>/environ.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        fields = _read(entry / "stat").rpartition(b")")[2].split() if entry.name.isdigit() else []
        if fields and fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        young = set(children.get(waiting.pop(), [])) - found
        found |= young
        waiting += young
    return found


def mapped_inodes(pids: Iterable[int]) -> set[int]:
    """Inode numbers of the files in /dev/shm that these processes map (a semaphore's mapping has lost its name)."""
    lines = (line.split(None, 5) for pid in pids for line in _read(Path(f"/proc/{pid}/maps")).splitlines())
    return {int(fields[4]) for fields in lines if len(fields) == 6 and fields[5].startswith(b"/dev/shm/")}


def unlink_segments(inodes: set[int]) -> list[str]:
    """Remove the names of vLLM's shared memory and semaphores with these inodes.

    Returns those removed of which Python's helper process was told, because their makers want to remove them again.
    """
    removed = []
    for path in _FOLDER.iterdir():
        if not path.name.startswith((_MEMORY, _SEMAPHORE, _RANKS)) or _inode(path) not in inodes:
            continue
        path.unlink(missing_ok=True)
        if not path.name.startswith(_RANKS):
            resource_tracker.unregister(*_tracked(path.name))
            removed.append(path.name)
    logger.debug("removed the names of %d shared-memory segments", len(removed))
    return removed


@contextmanager
def names_restored(removed: Iterable[str]) -> Iterator[None]:
    """Empty files under the removed names while vLLM's processes end: who made a segment wants to remove its name."""
    paths = [_FOLDER / name for name in removed]
    for path in paths:
        path.touch()
        resource_tracker.register(*_tracked(path.name))
    try:
        yield
    finally:
        for path in paths:
            if path.exists():  # its maker was killed before it could
                path.unlink(missing_ok=True)
                resource_tracker.unregister(*_tracked(path.name))


def _tracked(name: str) -> tuple[str, str]:
    """Name and kind under which Python's helper process, shared by all of vLLM's, knows a file in /dev/shm."""
    if name.startswith(_SEMAPHORE):
        return f"/{name.removeprefix('sem.')}", "semaphore"
    return f"/{name}", "shared_memory"


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:  # somebody else removed it meanwhile
        return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process ended, or is somebody else's
        return b""
