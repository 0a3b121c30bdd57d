"""Laws of the checksum that a GPU can compute: it is the bytes', it sees every fault, and CUDA IPC says what it needs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.weights import device_checksum as module
from nemo_rl_like.weights.cuda_ipc import CudaIpcSender, device_uuid
from nemo_rl_like.weights.device_checksum import device_checksum
from nemo_rl_like.weights.errors import WeightSyncError


def by_loops(data: bytes) -> str:
    """The definition, in plain integers."""
    mask = (1 << 64) - 1
    padded = data + bytes(-len(data) % 8)
    sums = []
    for odd in module._ODD:
        total = 0
        for place in range(len(padded) // 8):
            word = int.from_bytes(padded[8 * place : 8 * place + 8], "little")
            total += word * (((place * odd) ^ (place >> 7)) | 1)
        sums.append((total + len(data)) & mask)
    return "".join(f"{value:016x}" for value in sums)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_it_is_the_sum_it_says_it_is(data: bytes) -> None:
    assert device_checksum(tensor_of(data)) == by_loops(data)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_flipped_bit_is_always_seen(data: bytes, draw: st.DataObject) -> None:
    at, bit = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, 7))
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    assert device_checksum(tensor_of(bytes(changed))) != device_checksum(tensor_of(data))


@settings(deadline=None)
@given(st.permutations(range(12)))
def test_values_that_change_place_are_seen(order: list[int]) -> None:
    values = torch.arange(12, dtype=torch.float32)
    moved = device_checksum(values[order]) != device_checksum(values)
    assert moved == (order != sorted(order))


def test_chunks_views_and_types_do_not_matter_but_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(7, 33, generator=generator).to(torch.bfloat16)
    whole = device_checksum(values)
    assert device_checksum(torch.cat([values, values])[7:]) == whole
    assert device_checksum(values.t().contiguous().t()) == whole
    assert device_checksum(values[:, :-1]) != whole
    assert device_checksum(torch.zeros(8)) != device_checksum(torch.zeros(9))
    monkeypatch.setattr(module, "_CHUNK_WORDS", 5)
    assert device_checksum(values) == whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_cuda_ipc_says_what_it_needs() -> None:
    with pytest.raises(WeightSyncError, match="needs an NVIDIA GPU"):
        device_uuid()
    with pytest.raises(WeightSyncError, match="tensor w is on cpu; CUDA IPC carries GPU memory"):
        CudaIpcSender().publish(3, [("w", torch.ones(2))])
