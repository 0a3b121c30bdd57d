"""Laws of the comparison of both ends of a weight sync."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.manifest import Manifest, TensorEntry, checksum, compare, tensor_bytes

NAMES = ("a", "b", "c")
MANIFEST = Manifest(4, tuple(TensorEntry(n, (2,), "float32", 8, f"hash-{n}") for n in NAMES))
RECEIVED = {n: f"hash-{n}" for n in NAMES}


def test_equal_ends_agree() -> None:
    compare(MANIFEST, RECEIVED, NAMES, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_fault_is_told_by_its_kind_and_tensor(name: str) -> None:
    others = [n for n in NAMES if n != name]
    without = {n: RECEIVED[n] for n in others}
    cases = {
        rf"version 4 .*sent but not received: {name}$": (without, others, NAMES),
        rf"different bytes at the receiver \(sha256\): {name}$": (RECEIVED | {name: "x"}, NAMES, NAMES),
        rf"not consumed by the engine's model: {name}$": (RECEIVED, others, NAMES),
        rf"sent but unknown to the engine's model: {name}$": (RECEIVED, NAMES, others),
        "received but not sent: extra$": (RECEIVED | {"extra": "h"}, (*NAMES, "extra"), NAMES),
        "needed by the engine's model but not sent: extra$": (RECEIVED, NAMES, (*NAMES, "extra")),
    }
    for message, (received, consumed, expected) in cases.items():
        with pytest.raises(WeightSyncError, match=message):
            compare(MANIFEST, received, consumed, expected)


def test_a_long_list_of_names_is_cut_with_its_count() -> None:
    manifest = Manifest(1, tuple(TensorEntry(f"t{i:02}", (1,), "float32", 4, "") for i in range(20)))
    with pytest.raises(WeightSyncError, match="t07 and 12 more$"):
        compare(manifest, {})


def test_one_flipped_bit_changes_the_checksum() -> None:
    data = bytearray(tensor_bytes(torch.randn(3, 3)))
    before = checksum(memoryview(data))
    data[17] ^= 1
    assert checksum(memoryview(data)) != before
