"""Words of 64 bits in tensors: torch has signed ones only."""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1


def signed_64(value: int) -> int:
    """Any integer modulo 2**64, as a signed 64-bit number."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value
