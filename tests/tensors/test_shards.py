"""Laws of the one writer of sharded safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.tensors.shards import DTYPES, ShardFile, ShardWriter, index_json, write_shard


def writer_into(folder: Path, shard_bytes: int) -> ShardWriter:
    return ShardWriter(lambda index, held: write_shard(folder, f"{index}.safetensors", held), shard_bytes)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), max_size=9), shard_bytes=st.integers(1, 2500))
def test_any_shard_size_holds_every_tensor_once_and_no_shard_is_larger(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    want = {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}
    with writer_into(folder, shard_bytes) as writer:
        for name, tensor in want.items():
            writer.add(name, tensor)
    weight_map = json.loads(index_json(writer.files))["weight_map"]
    assert weight_map.keys() == want.keys()
    for name, file in weight_map.items():
        assert torch.equal(load_file(folder / file)[name], want[name])
    for shard in writer.files:
        assert len(shard.tensors) == 1 or shard.tensor_bytes <= shard_bytes
        assert (shard.size, shard.sha256) == ((folder / shard.path).stat().st_size, sha256_file(folder / shard.path))


def test_every_type_and_layout_is_written_as_safetensors_reads_it(tmp_path: Path) -> None:
    want: dict[str, Tensor] = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    want |= {"turned": torch.randn(4, 6).t(), "empty": torch.zeros(0, 4), "scalar": torch.tensor(3.5)}
    write_shard(tmp_path, "all.safetensors", want)
    found = load_file(tmp_path / "all.safetensors")
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float()), name


def test_no_more_than_one_shard_is_held(tmp_path: Path) -> None:
    sizes: list[int] = []

    def write(index: int, held: Mapping[str, Tensor]) -> ShardFile:
        sizes.append(sum(tensor.nbytes for tensor in held.values()))
        return write_shard(tmp_path, f"{index}", held)

    writer = ShardWriter(write, 4000)
    for i in range(10):
        writer.add(f"t{i}", torch.zeros(300))
        assert len(sizes) == i // 3
    writer.close()
    assert sizes == [3600, 3600, 3600, 1200]


def test_a_name_is_written_once_in_any_shard(tmp_path: Path) -> None:
    writer = writer_into(tmp_path, 10)
    writer.add("a", torch.zeros(4))
    writer.add("b", torch.zeros(4))
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=f"{name!r} was written twice"):
            writer.add(name, torch.zeros(4))
    one = write_shard(tmp_path, "one", {"w": torch.zeros(1)})
    with pytest.raises(ValueError, match="'w' is in one and in one"):
        index_json([one, one])


def test_halfway_comes_once_with_half_of_the_bytes_in_the_file(tmp_path: Path) -> None:
    sizes: list[int] = []
    tensors = {f"t{i}": torch.zeros(250) for i in range(4)}
    note = partial(lambda path: sizes.append(path.stat().st_size), tmp_path / "s")
    shard = write_shard(tmp_path, "s", tensors, halfway=note)
    assert sizes == [shard.size - 2000]


def test_what_safetensors_cannot_hold_and_shards_of_no_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="complex64"):
        writer_into(tmp_path, 10).add("z", torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        writer_into(tmp_path, 0)
