"""What a weight sync carries: names, shapes and checksums, and the comparison of both ends."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.weights.errors import WeightSyncError

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its sender describes it."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the element type, for example `float32`."""
    nbytes: int
    """Size, in bytes."""
    sha256: str
    """Hexadecimal digest of the row-major bytes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of one weight version, in the order in which they are sent."""

    version: int
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The row-major bytes of `tensor`: its own memory if it is a contiguous CPU tensor, otherwise a copy's."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def checksum(data: memoryview) -> str:
    """sha256 of raw bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def compare(
    manifest: Manifest,
    received: Mapping[str, str],
    consumed: Collection[str] | None = None,
    expected: Collection[str] | None = None,
) -> None:
    """Check a receiver's account of a sync against the sender's manifest.

    `received`: sha256 of the bytes that were read, by name. `consumed`: names that reached a parameter of the model
    (None: nothing was loaded yet). `expected`: names that the receiver's model needs (None: unknown).
    Raises WeightSyncError naming every missing, unsent, unknown, differing or unconsumed tensor.
    """
    sent = {entry.name: entry.sha256 for entry in manifest.entries}
    findings = {
        "sent but not received": sent.keys() - received.keys(),
        "received but not sent": received.keys() - sent.keys(),
        "different bytes at the receiver (sha256)": {
            n for n, digest in received.items() if sent.get(n, digest) != digest
        },
    }
    if expected is not None:
        findings["needed by the engine's model but not sent"] = set(expected) - sent.keys()
        findings["sent but unknown to the engine's model"] = sent.keys() - set(expected)
    if consumed is not None:
        findings["received but not consumed by the engine's model"] = received.keys() - set(consumed)
    told = [f"{what}: {_names(names)}" for what, names in findings.items() if names]
    if told:
        raise WeightSyncError(f"weight sync of version {manifest.version} failed; " + "; ".join(told))


def _names(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
