"""A checksum of a tensor's bytes that is computed where the tensor is, CPU or GPU, with the same result."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_rl_like.tensors.words import signed_64

_MASK_64 = (1 << 64) - 1
_ODD = (0x9E3779B97F4A7C15, 0xD1342543DE82EF95)
"""Steps of the two sequences of multipliers."""
_CHUNK_WORDS = 1 << 24
"""Words multiplied at once, to bound the memory that a checksum takes."""


def device_checksum(tensor: Tensor) -> str:
    """128 bits, hexadecimal, over the row-major bytes of `tensor`: two sums of its 64-bit words times odd multipliers.

    Modulo 2**64 a changed word always changes both sums, and words that change place do with certainty but for one chance in
    about 2**64. It guards against faults, not against an adversary, who should meet sha256.
    """
    words = _words(tensor)
    sums = [0, 0]
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        place = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
        for which, odd in enumerate(_ODD):
            multiplier = (place * signed_64(odd)) ^ (place >> 7) | 1
            sums[which] += int((part * multiplier).sum())
    size = tensor.numel() * tensor.element_size()
    return "".join(f"{(value + size) & _MASK_64:016x}" for value in sums)


def _words(tensor: Tensor) -> Tensor:
    """int64 view of the bytes, padded with zeros to whole words."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing or flat.storage_offset() % 8:
        padded = flat.new_zeros(flat.numel() + missing)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64)
