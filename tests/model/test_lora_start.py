"""Training of adapters goes on from PEFT's: the model begins as PEFT's own, its base stays below, and what differs from the spec is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.export.hf import copy_adapters
from nemo_rl_like.model.check_rank import row_logits
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader, write_weights
from nemo_rl_like.model.lora import adapters_off, add_adapters
from nemo_rl_like.model.lora_map import AdapterMap
from nemo_rl_like.model.lora_start import StartAdapters, check_start
from nemo_rl_like.policy.store import write_adapter_config
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec
from tests.model import tiny
from tests.model.test_merged_weights import EXPERTS, TOKENS, logits_of, lora, with_setting, write_adapter

LORA = LoraSpec(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))
SPECS: Mapping[str, tuple[str, LoraSpec, dict[str, Any]]] = {
    "plain": ("llama", LORA, {"target_modules": ["q_proj", "down_proj"]}),
    "lengths of rows": ("qwen2", LoraSpec(rank=4, alpha=6.0, dora=True, targets=("v_proj", "o_proj")), {"target_modules": ["v_proj", "o_proj"], "use_dora": True}),
    "rank-stabilised": ("qwen3", LoraSpec(rank=4, alpha=6.0, rslora=True, targets=("k_proj",)), {"target_modules": ["k_proj"], "use_rslora": True}),
    "experts in one tensor": ("gpt_oss", LoraSpec(rank=4, alpha=6.0, targets=("q_proj", "gate_up_proj", "down_proj")), {"target_modules": ["q_proj"], **EXPERTS}),
}  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", SPECS)
def test_the_model_begins_as_peft_s_and_its_base_stays(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    family, spec, settings = SPECS[kind]
    theirs = logits_of(write_adapter(folders[family], tmp_path / "adapter", lora(**settings)))
    config = ModelConfig.from_hf_folder(folders[family])
    with SafetensorsReader(folders[family]) as weights:
        model = build_model(config, LayoutSpec(), torch.float32, weights=weights, adapters=True).eval()
    add_adapters(model, config, spec.model_copy(update={"path": str(tmp_path / "adapter")}), seed=1)
    ours = row_logits(model, TOKENS)
    with adapters_off(model):
        below = row_logits(model, TOKENS)
    for found, expected in ((ours, theirs), (below, logits_of(tiny.hugging_face(folders[family])))):
        assert found is not None
        for mine, other in zip(found, expected, strict=True):
            assert float((mine - other).detach().abs().max()) <= 1e-5 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", LORA.targets),
        ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")),
        ("mixtral", ("q_proj", "gate_proj", "up_proj", "down_proj")),
        ("gpt_oss", ("gate_up_proj", "down_proj")),
        ("gpt_oss", ("v_proj", "down_proj")),
    ],
)
def test_what_a_run_exports_another_goes_on_from_bit_for_bit(
    family: str, targets: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = ModelConfig.from_hf_folder(folders[family])
    spec = LoraSpec(rank=3, alpha=5.0, rslora=True, targets=targets)
    torch.manual_seed(0)
    mine = {name: torch.randn(shape) for name, shape in AdapterMap(config, spec).hf_shapes().items()}
    write_weights(tmp_path / "checkpoint" / "adapter", mine.items(), 1 << 30)
    write_adapter_config(tmp_path / "checkpoint" / "adapter" / "adapter_config.json", spec, config, folders[family])
    (tmp_path / "out").mkdir()
    copy_adapters(tmp_path / "checkpoint", tmp_path / "out")
    read = StartAdapters(config, spec, tmp_path / "out")
    assert list(read.keys()) == sorted(mine)
    assert all(torch.equal(read.get(name), tensor) for name, tensor in mine.items())


REFUSED: Mapping[str, tuple[dict[str, Any], Callable[[Path], None] | None, str]] = {
    "rank": ({"rank": 8, "alpha": 12.0}, None, r"`policy.lora.rank` is `8`, and in .*adapter, which `policy.lora.path` goes on from, the rank of model.layers.0.* is 4; set `rank: 4`"),
    "alpha": ({"alpha": 12.0}, None, r"`policy.lora.alpha` is `12` with `rslora: false`, and in .* is 6; set `alpha: 6`"),
    "rslora": ({"rslora": True}, None, r"`policy.lora.alpha` is `6` with `rslora: true`, and in .* is 3; set `alpha: 3`"),
    "dora": ({"dora": True}, None, "`policy.lora.dora` is `true`, and in .*, use_dora is false; set `dora: false`"),
    "targets": ({"targets": ("q_proj", "v_proj")}, None, r"`policy.lora.targets` is \[q_proj, v_proj\], and .* has adapters of \[down_proj, q_proj\]"),
    "patterns": ({}, with_setting("alpha_pattern", {"down_proj": 8}), r"`policy.lora.alpha` is `6` .* that of model.layers.0.mlp.down_proj is 8"),
    "kind": ({}, with_setting("peft_type", "IA3"), "`peft_type` is 'IA3', and only LORA"),
    "layers": ({}, lambda folder: with_layers(folder), "lacks base_model.model.model.layers.2.* and 1 more"),
    "whole": ({}, lambda folder: with_head(folder), r"'base_model.model.lm_head.weight' is a whole tensor beside the adapters \(`modules_to_save`\)"),
    "none": ({}, lambda folder: (folder / "adapter_config.json").unlink(), "`policy.lora.path` is '.*adapter', which has no adapter_config.json"),
}  # fmt: skip


def with_layers(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if ".layers.2." not in name}, file)


def with_head(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.lm_head.weight": torch.ones(131, 64)}, file)


@pytest.mark.parametrize("case", REFUSED)
def test_what_differs_from_the_spec_is_refused_with_both_values(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    changes, change, words = REFUSED[case]
    write_adapter(folders["llama"], tmp_path / "adapter", lora(target_modules=["q_proj", "down_proj"]))
    config = ModelConfig.from_hf_folder(folders["llama"])
    check_start(config, LORA.model_copy(update={"path": str(tmp_path / "adapter")}))
    if change is not None:
        change(tmp_path / "adapter")
    spec = LoraSpec(**{**LORA.model_dump(), **changes, "path": str(tmp_path / "adapter")})
    with pytest.raises(InputError, match=words):
        check_start(config, spec)


def test_adapters_of_another_width_and_joined_experts_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    write_adapter(folders["gemma2"], tmp_path / "gemma", lora(target_modules=["q_proj", "down_proj"]))
    config = ModelConfig.from_hf_folder(folders["qwen3"])
    with pytest.raises(InputError, match=r"has shape \[64, 4\], which does not fit this qwen3 model \(\[128, 4\]\)"):
        check_start(config, LORA.model_copy(update={"path": str(tmp_path / "gemma")}))
    write_adapter(folders["mixtral"], tmp_path / "experts", lora(target_modules=["q_proj"], **EXPERTS))
    mixtral = ModelConfig.from_hf_folder(folders["mixtral"])
    with pytest.raises(InputError, match="has the adapters of a layer's experts as one"):
        check_start(mixtral, LORA.model_copy(update={"path": str(tmp_path / "experts")}))
    assert json.loads((tmp_path / "experts" / "adapter_config.json").read_text())["r"] == LORA.rank
