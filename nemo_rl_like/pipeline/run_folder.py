"""The output folder of a run: whose it is, who uses it now, and what may be done with it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.artifacts.files import nearest_existing

logger = logging.getLogger(__name__)

MARKER = ".nrl-run"
"""File that makes a folder ours; it is locked while a run uses the folder."""

LEFTOVERS = ".tmp-*"
"""How files and folders that are being written are named, everywhere; those of a killed run are removed at the next start."""

Start = Literal["new", "resume", "overwrite"]

_ATTEMPTS, _PAUSE_S = 5, 0.1


def check_output(path: Path, start: Start) -> None:
    """Refuse early what `RunFolder.open` would refuse; changes nothing.

    Raises:
        OutputFolderError: see `RunFolder.open`.
    """
    _check_content(path, start)
    holder = holder_of(path)
    if holder is not None:
        raise _in_use(path, holder)


def _check_content(path: Path, start: Start) -> None:
    nearest = nearest_existing(path)
    if not nearest.is_dir():
        what = "is a file" if nearest == path else f"lies below {nearest}, which is a file"
        raise OutputFolderError(f"output folder {path} {what}; set `output` to another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputFolderError(
            f"output folder {path}: no permission to write in {nearest}; set `output` to a folder of yours"
        )
    names = {p.name for p in path.iterdir()} if path.is_dir() else set()
    if names and MARKER not in names:
        raise OutputFolderError(
            f"output folder {path} holds files that are not of a run (such as {min(names)!r}), so it is never touched; "
            "set `output` to a new or empty folder"
        )
    if start == "new" and names - {MARKER}:
        raise OutputFolderError(
            f"output folder {path} already holds a run; continue it with --resume, replace it with --overwrite, "
            "or set `output` to another folder"
        )


@dataclass(slots=True)
class RunFolder:
    """An output folder that this process alone uses; a context manager that gives it free."""

    path: Path
    _lock: int

    @classmethod
    def open(cls, path: Path, start: Start) -> Self:
        """Take the folder for one run: `new` needs it empty, `resume` continues or starts, `overwrite` clears it first.

        Raises:
            OutputFolderError: it is a file, not writable, holds foreign files or a run that was not to be touched, or another
                process uses it.
        """
        _check_content(path, start)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / MARKER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OutputFolderError(
                f"output folder {path} cannot be written: {error.strerror}; set `output` elsewhere"
            ) from error
        try:
            _take(lock, path)
            _check_content(path, start)
            if start == "overwrite":
                _clear(path)
            _remove_leftovers(path)
        except OutputFolderError:
            os.close(lock)
            raise
        return cls(path, lock)

    def close(self) -> None:
        """Give the folder free for the next run."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def holder_of(path: Path) -> str | None:
    """Who uses the run folder now; None: nobody. Changes nothing.

    Raises:
        OutputFolderError: its marker cannot be read.
    """
    try:
        marker = os.open(path / MARKER, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputFolderError(f"{path / MARKER} cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named(marker)
    finally:
        os.close(marker)
    return None


def _in_use(path: Path, holder: str) -> OutputFolderError:
    return OutputFolderError(f"output folder {path} is in use by {holder}; wait for it or stop it first")


def _take(lock: int, path: Path) -> None:
    """Lock the marker, or say who holds it. `holder_of` in another process has it for a moment, which is waited for."""
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise OutputFolderError(f"output folder {path} cannot be locked: {error.strerror}") from error
            if attempt == _ATTEMPTS - 1:
                raise _in_use(path, _named(lock)) from error
            time.sleep(_PAUSE_S)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _named(marker: int) -> str:
    """What the marker says of its holder."""
    return os.pread(marker, 200, 0).decode(errors="replace").strip() or "another process"


def _clear(path: Path) -> None:
    """Remove everything but the marker, which keeps the folder ours if this is killed half-way."""
    logger.info("clearing output folder %s", path)
    for entry in path.iterdir():
        if entry.name != MARKER:
            _remove(entry)


def _remove_leftovers(path: Path) -> None:
    """Remove what a killed run was writing; the lock says that nobody is writing now."""
    for entry in list(path.rglob(LEFTOVERS)):
        if entry.exists() or entry.is_symlink():
            _remove(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
