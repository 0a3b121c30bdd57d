"""Weights between processes of one node, through an anonymous memory file that dies with its last user.

The sender writes every tensor into a sealed `memfd` and hands out a small description. The receiver opens
`/proc/<sender>/fd/<n>` and maps it. The file has no name in any file system, so nothing is left behind when either side
is killed, and the seals make its content immutable: what was hashed is what is loaded.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from nemo_rl_like.artifacts import faults
from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.manifest import Manifest, TensorEntry, checksum, dtype_name, tensor_bytes

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_MOST_THREADS = 8
"""Most threads that copy and hash at one end; neither holds the interpreter."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """Where a receiver on the same node finds the tensors; small, picklable, valid until the sender closes or dies."""

    manifest: Manifest
    offsets: tuple[int, ...]
    """Start of each entry in the file, in bytes."""
    pid: int
    """The sender's process id."""
    descriptor: int
    """The sender's descriptor of the file."""
    inode: int
    """Inode number of the file: tells a reused process id or descriptor."""
    place: str
    """Boot and process-id namespace of the sender, see `place`."""

    def to_json(self) -> str:
        """Text form, for channels that carry no Python objects."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SharedMemoryHandle:
        """Undo `to_json`."""
        fields = json.loads(text)
        entries = tuple(TensorEntry(**{**e, "shape": tuple(e["shape"])}) for e in fields["manifest"]["entries"])
        manifest = Manifest(fields["manifest"]["version"], entries)
        return cls(**{**fields, "manifest": manifest, "offsets": tuple(fields["offsets"])})


def place() -> str:
    """Identifies what may see this process under /proc: the running kernel and the process-id namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def new_file(version: int) -> int:
    """Descriptor of an empty memory file without a name."""
    return os.memfd_create(f"nrl-weights-{version}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write(descriptor: int, data: memoryview, offset: int) -> None:
    """Put all of `data` at `offset`, in bytes."""
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def seal(descriptor: int) -> None:
    """Make the file's content immutable."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def handle_of(manifest: Manifest, offsets: Sequence[int], descriptor: int) -> SharedMemoryHandle:
    """Describe a sealed file of this process."""
    inode = os.fstat(descriptor).st_ino
    return SharedMemoryHandle(manifest, tuple(offsets), os.getpid(), descriptor, inode, place())


class SharedMemorySender:
    """The sending end. Holds the memory of one version: publishing the next one gives back the last one's.

    A handle is readable until the next `publish`, `close` or the sender's end. Not thread-safe.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> SharedMemoryHandle:
        """Copy `tensors` (Hugging Face name, tensor) on several threads, a few at a time, and describe them.

        A tensor must not change before this returns. Raises WeightSyncError if a name comes twice or nothing comes, OSError
        if memory runs out.
        """
        self.close()
        self._descriptor = descriptor = new_file(version)
        copies: list[Future[TensorEntry]] = []
        offsets: list[int] = []
        names: set[str] = set()
        end = 0
        threads = _threads()
        with ThreadPoolExecutor(threads, "publish") as pool:
            for name, tensor in tensors:
                if name in names:
                    raise WeightSyncError(f"weight sync of version {version}: tensor {name} was sent twice")
                names.add(name)
                offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT if tensor.nbytes else end)
                end = offsets[-1] + tensor.nbytes
                copies.append(pool.submit(_copy, descriptor, offsets[-1], name, tensor))
                if len(copies) > 2 * threads:
                    copies[-2 * threads - 1].result()  # tensors that wait for a thread take memory
            entries = tuple(copy.result() for copy in copies)
        if not entries:
            raise WeightSyncError(f"weight sync of version {version}: no tensors were given")
        seal(descriptor)
        manifest = Manifest(version, entries)
        logger.debug("published version %d: %d tensors, %d bytes", version, len(entries), manifest.nbytes)
        return handle_of(manifest, offsets, descriptor)

    def close(self) -> None:
        """Give the memory back (receivers that have it mapped keep it until they are done)."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(handle: SharedMemoryHandle) -> Iterator[tuple[str, Tensor, str]]:
    """The receiving end: (name, tensor, sha256 of the bytes read), one at a time, in the sender's order.

    The tensors are views of the shared memory and keep it alive; writing to one changes nobody else's. The bytes are
    hashed on several threads, ahead of what was yielded.
    Raises WeightSyncError if the sender has gone or published something newer, or is on another node.
    """
    memory = _map(handle)
    entries = handle.manifest.entries
    pieces = [_piece(memory, handle, index) for index in range(len(entries))]
    with ThreadPoolExecutor(_threads(), "hashing") as hashing:
        for index, digest in enumerate(hashing.map(checksum, pieces)):
            if index == len(entries) // 2:
                faults.point("sync.mid")
            yield entries[index].name, _tensor(memory, entries[index], handle.offsets[index]), digest


def _piece(memory: mmap.mmap, handle: SharedMemoryHandle, index: int) -> memoryview:
    """The bytes of one entry."""
    entry, start = handle.manifest.entries[index], handle.offsets[index]
    end = start + entry.nbytes
    if end > len(memory):
        raise WeightSyncError(
            f"weight sync of version {handle.manifest.version}: tensor {entry.name} ends at byte {end}, "
            f"but the shared memory has {len(memory)}"
        )
    return memoryview(memory)[start:end]


def _threads() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _copy(descriptor: int, offset: int, name: str, tensor: Tensor) -> TensorEntry:
    data = tensor_bytes(tensor)
    write(descriptor, data, offset)
    return TensorEntry(name, tuple(tensor.shape), dtype_name(tensor.dtype), data.nbytes, checksum(data))


def _map(handle: SharedMemoryHandle) -> mmap.mmap:
    what = f"weight sync of version {handle.manifest.version}"
    if handle.place != place():
        raise WeightSyncError(
            f"{what}: the sender (process {handle.pid}) runs on another node or in another process-id namespace; shared memory "
            "is for one node; `WeightServer` and `WeightMirror` bring it to others"
        )
    try:
        descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            f"{what}: the shared memory of process {handle.pid} cannot be opened ({error.strerror}); the sender ended, "
            "closed it or published a newer version"
        ) from error
    try:
        status = os.fstat(descriptor)
        if status.st_ino != handle.inode:
            raise WeightSyncError(
                f"{what}: process {handle.pid} has another file at descriptor {handle.descriptor} now; "
                "the sender published a newer version or its process id was reused"
            )
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _tensor(memory: mmap.mmap, entry: TensorEntry, offset: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(entry.shape)
