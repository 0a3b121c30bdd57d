"""Laws of the weight map on one rank: coverage both ways, shapes, packing (layouts over ranks: test_parallel)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.scratch import ScratchReader
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.model.weight_shards import pack_qkv, unpack_qkv
from nemo_rl_like.spec.policy import LayoutSpec
from tests.model import tiny


class Changed:
    """A reader over a folder with some tensors replaced, added or (None) removed."""

    def __init__(self, folder: Path, changes: dict[str, Tensor | None]) -> None:
        reader = SafetensorsReader(folder)
        self._tensors = {name: reader.get(name) for name in reader.keys()}
        self._tensors.update({k: v for k, v in changes.items() if v is not None})
        for name in (k for k, v in changes.items() if v is None):
            del self._tensors[name]

    def keys(self) -> Sequence[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    def source(self, name: str) -> str:
        return "weights-file"


def build(folder: Path, reader: Changed) -> None:
    build_model(ModelConfig.from_hf_folder(folder), LayoutSpec(), torch.float32, weights=reader)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_map_has_exactly_the_keys_and_shapes_of_hugging_face(folders: dict[str, Path], family: str) -> None:
    with SafetensorsReader(folders[family]) as reader:
        shapes = {name: reader.shape(name) for name in reader.keys()}
    assert WeightMap(ModelConfig.from_hf_folder(folders[family])).hf_shapes() == shapes


@pytest.mark.usefixtures("one_rank")
def test_keys_that_are_missing_or_have_no_place_are_listed(folders: dict[str, Path]) -> None:
    reader = Changed(folders["llama"], {"model.norm.weight": None, "model.extra.weight": torch.zeros(1)})
    with pytest.raises(InputError) as caught:
        build(folders["llama"], reader)
    assert "missing keys: ['model.norm.weight']" in str(caught.value)
    assert "without a place: ['model.extra.weight']" in str(caught.value)
    for change in ({"model.norm.weight": None}, {"model.extra.weight": torch.zeros(1)}):
        with pytest.raises(InputError, match="do not fit a llama model"):
            build(folders["llama"], Changed(folders["llama"], change))


@pytest.mark.usefixtures("one_rank")
def test_a_wrong_shape_names_file_key_and_both_shapes(folders: dict[str, Path]) -> None:
    reader = Changed(folders["llama"], {"model.norm.weight": torch.zeros(7)})
    with pytest.raises(InputError, match=r"weights-file: tensor model.norm.weight has shape \[7\].*asks for \[64\]"):
        build(folders["llama"], reader)


@pytest.mark.usefixtures("one_rank")
def test_a_tied_head_stored_twice_must_be_the_same(folders: dict[str, Path]) -> None:
    folder = folders["llama_tied"]
    with SafetensorsReader(folder) as reader:
        embedding = reader.get("model.embed_tokens.weight").clone()
    build(folder, Changed(folder, {"lm_head.weight": embedding}))
    with pytest.raises(InputError, match="tie_word_embeddings is true"):
        build(folder, Changed(folder, {"lm_head.weight": embedding + 1}))


@pytest.mark.usefixtures("one_rank")
def test_a_head_left_in_an_untied_config_is_not_lost(folders: dict[str, Path]) -> None:
    shape = replace(ModelConfig.from_hf_folder(folders["llama_tied"]), tie_embeddings=False)
    with pytest.raises(InputError, match=r"missing keys: \['lm_head.weight'\]"):
        build_model(shape, LayoutSpec(), torch.float32, weights=SafetensorsReader(folders["llama_tied"]))


@pytest.mark.usefixtures("one_rank")
def test_every_parameter_must_be_given_when_tensors_are_exported(folders: dict[str, Path]) -> None:
    shape = ModelConfig.from_hf_folder(folders["llama"])
    model = build_model(shape, LayoutSpec(), torch.float32, seed=1)
    moments = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    moments.pop("pipeline.0.decoder.final_layernorm.weight")
    with pytest.raises(ValueError, match="final_layernorm"):
        list(WeightMap(shape).iter_hf(model, moments))


def test_packing_puts_each_key_head_with_its_queries_and_back() -> None:
    q, k, v = torch.arange(8.0)[:, None], torch.arange(10.0, 14.0)[:, None], torch.arange(20.0, 24.0)[:, None]
    packed = pack_qkv(q, k, v, kv_heads=2)  # head width 2, two queries per key head
    assert packed.flatten().tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert all(torch.equal(a, b) for a, b in zip(unpack_qkv(packed, 2, 2), (q, k, v), strict=True))


def test_weights_from_scratch_depend_on_seed_and_name_only(folders: dict[str, Path]) -> None:
    shape = ModelConfig.from_hf_folder(folders["qwen2"])
    one, same, other = (ScratchReader(shape, seed, torch.float32) for seed in (1, 1, 2))
    name, second = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(one.get(name), same.get(name))
    assert not torch.equal(one.get(name), other.get(name))
    assert not torch.equal(one.get(name), one.get(second))
    assert abs(float(one.get(name).std()) - shape.init_std) < 0.1 * shape.init_std
    assert one.get("model.norm.weight").unique().tolist() == [1.0]
    assert one.get("model.layers.0.self_attn.q_proj.bias").unique().tolist() == [0.0]
