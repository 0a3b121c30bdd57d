"""Laws of reading and writing safetensors folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SINGLE, SafetensorsReader, write_hf_folder, write_weights
from nemo_rl_like.tensors.shards import INDEX
from tests.model import tiny


def exported(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with SafetensorsReader(folder) as reader:
        for name in reader.keys():
            yield name, reader.get(name)


@pytest.mark.parametrize(("shard_bytes", "shards"), [(1 << 30, 1), (60_000, 0)])
def test_a_written_folder_holds_the_same_tensors_and_loads_in_transformers(
    folders: dict[str, Path], tmp_path: Path, shard_bytes: int, shards: int
) -> None:
    source = folders["qwen3"]
    files = write_hf_folder(tmp_path, ModelConfig.from_hf_folder(source), exported(source), None, shard_bytes)
    count = len([f for f in files if f.suffix == ".safetensors"])
    assert count == shards or (shards == 0 and count > 2)
    assert all(f.stat().st_size < shard_bytes + 5000 for f in files)
    assert not list(tmp_path.glob(".part*"))
    for (name, tensor), (same, original) in zip(exported(tmp_path), exported(source), strict=True):
        assert name == same
        assert torch.equal(tensor, original)
    row = torch.arange(9)[None]
    models = [AutoModelForCausalLM.from_pretrained(str(f)) for f in (tmp_path, source)]
    assert torch.equal(models[0](input_ids=row).logits, models[1](input_ids=row).logits)


def test_tokenizer_files_come_along(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "notes.txt"):
        (tokenizer / name).write_text(name)
    source = folders["llama"]
    write_hf_folder(tmp_path / "out", ModelConfig.from_hf_folder(source), exported(source), tokenizer, 1 << 30)
    found = {p.name for p in (tmp_path / "out").iterdir()}
    assert found == {"config.json", SINGLE, "tokenizer.json", "chat_template.jinja"}


def test_a_rank_that_receives_no_tensor_writes_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    shape = ModelConfig.from_hf_folder(folders["llama"])
    assert write_hf_folder(tmp_path / "out", shape, iter([("a", None), ("b", None)]), None, 100) == []
    assert not (tmp_path / "out").exists()


def test_shards_are_full_and_the_index_finds_every_tensor(tmp_path: Path) -> None:
    files = write_weights(tmp_path, ((f"t{i}", torch.full((300,), float(i))) for i in range(10)), shard_bytes=4000)
    assert [f.name for f in files] == [*(f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)), INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 12_000
    with SafetensorsReader(tmp_path) as reader:
        assert [float(reader.get(f"t{i}")[0]) for i in range(10)] == list(range(10))
        assert reader.shape("t3") == (300,)


def _sharded(tmp_path: Path) -> Path:
    write_weights(tmp_path, ((f"t{i}", torch.zeros(200)) for i in range(6)), shard_bytes=2000)
    return tmp_path


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    shard = _sharded(tmp_path) / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(InputError, match="model-00002-of-00003.safetensors is not a whole safetensors file"):
        SafetensorsReader(tmp_path)


def test_a_corrupt_header_is_named(tmp_path: Path) -> None:
    shard = _sharded(tmp_path) / "model-00001-of-00003.safetensors"
    shard.write_bytes(b"\xff" * 64)
    with pytest.raises(InputError, match="model-00001-of-00003.safetensors"):
        SafetensorsReader(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (_sharded(tmp_path) / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="model-00003-of-00003.safetensors does not exist"):
        SafetensorsReader(tmp_path)


def test_a_tensor_that_only_the_index_has_is_named(tmp_path: Path) -> None:
    path = _sharded(tmp_path) / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match="model-00001-of-00003.safetensors lacks tensors .* ghost"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError, match=INDEX):
        SafetensorsReader(tmp_path)


def test_a_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match="pytorch_model.bin"):
        SafetensorsReader(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        SafetensorsReader(tmp_path / "nowhere")


def test_an_unknown_tensor_is_an_input_error(folders: dict[str, Path]) -> None:
    with SafetensorsReader(folders["llama"]) as reader, pytest.raises(InputError, match="no tensor 'nope'"):
        reader.get("nope")


def test_tied_weights_need_no_head(folders: dict[str, Path]) -> None:
    with SafetensorsReader(folders["llama_tied"]) as reader:
        assert "lm_head.weight" not in reader.keys()
    assert tiny.VOCAB % 2
