"""A vLLM worker extension that does one thing wrong on request. Runs inside vLLM's worker."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nemo_rl_like.generation.vllm_worker import WorkerExtension
from nemo_rl_like.weights.manifest import checksum, tensor_bytes
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle

from .tiny_models import Q


class FaultyWorker(WorkerExtension):
    """The product's extension with planted faults."""

    fault = ""
    rank: int
    """vLLM's number of this worker."""

    def plant(self, fault: str, rank: int | None = None) -> None:
        """Do `fault` from now on (in the worker `rank` only): `skip`, `flip`, `unread`, `stale_head`, `stale` or nothing."""
        self.fault = fault if rank in (None, self.rank) else ""

    def nrl_read(self, handle: SharedMemoryHandle) -> Iterator[tuple[str, Tensor, str]]:
        for name, tensor, digest in WorkerExtension.nrl_read(self, handle):
            if self.fault == "unread" and name == Q:
                continue
            if self.fault == "flip" and name == Q:
                ctypes.c_ubyte.from_address(tensor.data_ptr() + 11).value ^= 1
                yield name, tensor, checksum(tensor_bytes(tensor))
                continue
            yield name, tensor, digest

    def nrl_load(self, tensors: Sequence[tuple[str, Tensor]]) -> set[str]:
        if self.fault == "stale":  # says that it loaded all, and keeps the old
            return {name for name, _ in tensors}
        if self.fault == "skip":
            tensors = [(name, tensor) for name, tensor in tensors if name != Q]
        return WorkerExtension.nrl_load(self, tensors)

    def nrl_pack_heads(self, model: torch.nn.Module) -> None:
        if self.fault != "stale_head":
            WorkerExtension.nrl_pack_heads(self, model)
