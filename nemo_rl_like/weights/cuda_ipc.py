"""Weights between processes that share one NVIDIA GPU: the receiver maps the sender's memory, nothing goes through the host.

CUDA keeps the memory alive while a receiver has it mapped, and gives it back when both processes have ended, however they do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from nemo_rl_like.weights.device_checksum import device_checksum
from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.manifest import Manifest, TensorEntry, dtype_name

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
BUCKET_BYTES = 512 << 20
"""Size of one piece of shared GPU memory, in bytes; a larger tensor gets a piece of its own."""

Opener = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""How another process opens a bucket, as torch pickles it."""


@dataclass(frozen=True, slots=True)
class CudaIpcHandle:
    """Where a receiver with the same GPU finds the tensors; picklable, valid until the sender publishes again, closes or ends."""

    manifest: Manifest
    places: tuple[tuple[int, int], ...]
    """Bucket and offset in bytes of each entry."""
    buckets: tuple[Opener, ...]
    device: str
    """UUID of the GPU."""
    pid: int
    """The sender's process id."""


class CudaIpcSender:
    """The sending end. Holds a copy of one version in GPU memory: publishing the next one gives back the last one's."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Tensor] = []

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> CudaIpcHandle:
        """Copy `tensors` (Hugging Face name, tensor on one GPU), one at a time, and describe them.

        Raises WeightSyncError if a name comes twice, nothing comes, or a tensor is not on a GPU.
        """
        self.close()
        entries: dict[str, TensorEntry] = {}
        places: list[tuple[int, int]] = []
        used = 0
        for name, tensor in tensors:
            if name in entries:
                raise WeightSyncError(f"weight sync of version {version}: tensor {name} was sent twice")
            if not tensor.is_cuda:
                raise WeightSyncError(
                    f"weight sync of version {version}: tensor {name} is on {tensor.device}; CUDA IPC carries GPU memory, "
                    "use shared memory for tensors of the host"
                )
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            start = -(-used // _ALIGNMENT) * _ALIGNMENT
            if not self._buckets or start + data.numel() > self._buckets[-1].numel():
                self._buckets.append(data.new_empty(max(self._bucket_bytes, data.numel())))
                start = 0
            self._buckets[-1][start : start + data.numel()] = data
            used = start + data.numel()
            places.append((len(self._buckets) - 1, start))
            entries[name] = TensorEntry(
                name, tuple(tensor.shape), dtype_name(tensor.dtype), data.numel(), device_checksum(tensor)
            )
        if not entries:
            raise WeightSyncError(f"weight sync of version {version}: no tensors were given")
        torch.cuda.synchronize()
        manifest = Manifest(version, tuple(entries.values()))
        logger.debug("published version %d: %d tensors, %d bytes of GPU memory", version, len(entries), manifest.nbytes)
        openers = tuple(reduce_tensor(bucket) for bucket in self._buckets)
        return CudaIpcHandle(manifest, tuple(places), openers, device_uuid(), os.getpid())

    def close(self) -> None:
        """Give the memory back (a receiver that has it mapped keeps it until it is done)."""
        self._buckets = []


def read(handle: CudaIpcHandle) -> Iterator[tuple[str, Tensor, str]]:
    """The receiving end: (name, tensor, checksum of the bytes read), one at a time, in the sender's order.

    The tensors are views of the sender's memory: copy them, do not write to them. Raises WeightSyncError on another GPU or in
    the sender's own process, or if the memory cannot be opened.
    """
    version = handle.manifest.version
    if handle.device != device_uuid():
        raise WeightSyncError(
            f"weight sync of version {version}: the sender's GPU is {handle.device}, this process has {device_uuid()}; CUDA IPC "
            "needs trainer and engine on one GPU"
        )
    if handle.pid == os.getpid():
        raise WeightSyncError(
            f"weight sync of version {version}: CUDA IPC cannot be opened by the process that made it"
        )
    try:
        buckets = [opener(*arguments) for opener, arguments in handle.buckets]
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight sync of version {version}: the GPU memory of process {handle.pid} cannot be opened ({error}); the sender "
            "ended, closed it or published a newer version"
        ) from error
    for entry, (bucket, start) in zip(handle.manifest.entries, handle.places, strict=True):
        data = buckets[bucket][start : start + entry.nbytes]
        tensor = data.view(getattr(torch, entry.dtype)).view(entry.shape)
        yield entry.name, tensor, device_checksum(tensor)


def device_uuid() -> str:
    """UUID of this process's GPU. Raises WeightSyncError without one."""
    if not torch.cuda.is_available():
        raise WeightSyncError("CUDA IPC needs an NVIDIA GPU; this process sees none, use shared memory")
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
