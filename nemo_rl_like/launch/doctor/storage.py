"""Disks: the shared folder's locks, renames, speed and clock, /dev/shm and the folder for temporary files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_like.artifacts.files import nearest_existing
from nemo_rl_like.cluster.temp_folder import LONGEST_ROOT
from nemo_rl_like.launch.doctor.finding import Finding, ok

_LOCKER = "import fcntl,sys\ntry: fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept OSError: sys.exit(3)"
_DEADLINE_S = 30.0
_SLOW_S = 0.25
_SKEW_S = 5.0
_GIB = 1 << 30


def check_storage(shared: Path, object_store_gib: float) -> Iterator[Finding]:
    """All of it; `shared` is the folder that every host of the job sees, or the nearest that exists above it."""
    yield from check_shared(shared)
    yield from check_shm(object_store_gib, Path("/dev/shm"))
    yield from check_temp(Path(tempfile.gettempdir()))


def check_shared(folder: Path) -> Iterator[Finding]:
    """Locks hold between processes, a rename replaces in one move, a write is quick to be safe, and the clock is the host's."""
    folder = nearest_existing(folder.absolute())
    probe = folder / f".tmp-doctor-{uuid.uuid4().hex[:12]}"
    try:
        probe.mkdir()
    except OSError as error:
        yield Finding(
            "shared folder",
            "fail",
            f"{folder}: cannot be written: {error.strerror}",
            "set `output` to a folder that every host can write",
        )
        return
    try:
        yield from _probed(folder, probe)
    except OSError as error:
        yield Finding(
            "shared folder",
            "fail",
            f"{folder}: {error.strerror}",
            "free space or quota on it, or set `output` elsewhere",
        )
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _probed(folder: Path, probe: Path) -> Iterator[Finding]:
    seconds, skew = _written(probe / "one")
    if seconds > _SLOW_S:
        yield Finding(
            "shared folder",
            "warn",
            f"{folder}: a small file takes {seconds:.2f} s to be safe on disk (limit {_SLOW_S} s)",
            "put `output` on the parallel filesystem, or save less often",
        )
    if abs(skew) > _SKEW_S:
        yield Finding(
            "clock",
            "warn",
            f"{folder}'s clock is {skew:+.1f} s off this host's (limit {_SKEW_S:g} s)",
            "synchronise both with one time server",
        )
    (probe / "two").write_text("new")
    (probe / "two").replace(probe / "one")
    if (probe / "one").read_text() != "new":
        yield Finding(
            "shared folder",
            "fail",
            f"{folder}: a rename does not replace a file",
            "set `output` to a POSIX filesystem: checkpoints rely on it",
        )
    if not _locks_hold(probe / "lock"):
        yield Finding(
            "shared folder",
            "fail",
            f"{folder}: a lock does not keep another process out",
            "mount it with locking (NFS: without nolock; Lustre: with flock)",
        )
        return
    yield ok("shared folder", f"{folder}: locks, renames and {shutil.disk_usage(folder).free / _GIB:.0f} GiB free")


def _written(file: Path) -> tuple[float, float]:
    """Seconds until a small file is safe on disk, and how far its time is ahead of this host's."""
    started = time.monotonic()
    with file.open("w") as stream:
        stream.write("old")
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.monotonic() - started
    return seconds, file.stat().st_mtime - time.time()


def _locks_hold(file: Path) -> bool:
    """Whether a process that asks for a lock which this one holds is refused."""
    import fcntl

    with file.open("a") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        other = subprocess.run([sys.executable, "-I", "-S", "-c", _LOCKER, str(file)], timeout=_DEADLINE_S, check=False)
        return other.returncode == 3


def check_shm(object_store_gib: float, shm: Path) -> Iterator[Finding]:
    """Ray's object store and weights in shared memory fit /dev/shm."""
    if not shm.is_dir():
        yield Finding("shared memory", "fail", f"{shm} is not there", "mount a tmpfs on it")
        return
    free = shutil.disk_usage(shm).free / _GIB
    if free < object_store_gib:
        yield Finding(
            "shared memory",
            "fail",
            f"{shm} has {free:.1f} GiB free, `cluster.object_store_gib` is {object_store_gib:g}",
            "lower it, or give the container more (`launch.kubernetes.shm_gib`, docker --shm-size)",
        )
    else:
        yield ok("shared memory", f"{free:.1f} GiB free for {object_store_gib:g} GiB of objects")


def check_temp(folder: Path) -> Iterator[Finding]:
    """Temporary files have room, and a path short enough for Ray's sockets."""
    if len(str(folder)) > LONGEST_ROOT:
        yield Finding(
            "temporary files",
            "note",
            f"{folder} is longer than {LONGEST_ROOT} characters, so Ray's sockets go to /tmp",
            "",
        )
    free = shutil.disk_usage(folder).free / _GIB
    if free < 1:
        yield Finding(
            "temporary files",
            "warn",
            f"{folder} has {free:.2f} GiB free (limit 1)",
            "free some, or set TMPDIR to a roomier local disk",
        )
    else:
        yield ok("temporary files", f"{folder}: {free:.0f} GiB free")
