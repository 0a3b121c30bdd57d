"""What this process's control group allows it, which a scheduler or a container makes less than the host has.

A pod sees its group as the root of the file system; a step of Slurm sees the host's, and the limit stands in its own group or in one around it.
Source: the kernel's documentation of cgroups, version 2 and version 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of one version's files."""

    limit: str
    used: str
    cache: str
    """Entry of memory.stat: page cache that the kernel gives back before anything is killed for memory."""


_MEMORY = {
    "": _Files("memory.max", "memory.current", "inactive_file"),
    "memory": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller's name in version 1; version 2 has all in one tree, whose controllers have no name."""


def memory_limit() -> int | None:
    """Bytes that this process's group may have; None without a limit."""
    return min((limit for _, _, limit in _memory()), default=None)


def memory_left() -> int | None:
    """Bytes that it may still take, beside what the kernel would give back for it; None without a limit."""
    left = []
    for group, files, limit in _memory():
        used = _number(group / files.used)
        if used is not None:
            left.append(max(limit - used + _entry(group / "memory.stat", files.cache), 0))
    return min(left, default=None)


def process_limit() -> int | None:
    """Processes and threads that its group may have; None without a limit."""
    limits = (_number(group / "pids.max") for controller in ("", "pids") for group in _groups(controller))
    return min((limit for limit in limits if limit is not None), default=None)


def _memory() -> Iterator[tuple[Path, _Files, int]]:
    """Each group with a limit of its memory, the names of its files, and the limit."""
    for controller, files in _MEMORY.items():
        for group in _groups(controller):
            limit = _number(group / files.limit)
            if limit is not None:
                yield group, files, limit


def _groups(controller: str) -> Iterator[Path]:
    """This process's group and those around it, of which each limits it."""
    lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()] if _OWN.is_file() else []
    own = next((path for _, names, path in lines if controller in names.split(",")), "/")
    root = ROOT / controller
    group = root / own.lstrip("/")
    if ".." in group.parts:  # of another namespace than the file system's
        group = root
    while group != root:
        yield group
        group = group.parent
    yield root


def _number(file: Path) -> int | None:
    """The file's number; None for no limit and where the group has no such file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _entry(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
