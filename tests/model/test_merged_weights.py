"""A base with PEFT's adapters merged as it is read is PEFT's own merged model, in every kind of adapter; and what cannot be merged is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.check import check_folder
from nemo_rl_like.model.check_rank import row_logits
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.merged_reader import MergedReader, link_merged, open_weights
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import LayoutSpec
from tests.model import tiny

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8]]
KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
PATTERNS = {
    "rank_pattern": {"q_proj": 2, r"layers\.1\..*\.up_proj": 5},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 3},
}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "every linear layer": ("llama", {"target_modules": "all-linear"}),
    "a regular expression": ("llama", {"target_modules": r".*layers\.[12]\.(self_attn|mlp)\.(v|up)_proj"}),
    "biases": ("qwen2", {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
    "rank-stabilised": ("qwen3", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "patterns": ("llama", {"target_modules": ["q_proj", "up_proj"], **PATTERNS}),
    "lengths of rows": ("llama", {"target_modules": ["q_proj", "o_proj", "down_proj"], "use_dora": True}),
    "whole tensors": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "a tied whole embedding": ("llama_tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "embedding and head": ("llama", {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
    "packed projections": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "experts apart in files": ("mixtral", {"target_modules": ["q_proj"], **EXPERTS}),
    "experts by their matrices": ("qwen3_moe", {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}),
    "experts in one tensor": ("gpt_oss", {"target_modules": ["q_proj"], **EXPERTS}),
    "one tensor of experts": ("gpt_oss", {"target_modules": ["k_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
}  # fmt: skip
ON_A_RANK = ("biases", "lengths of rows", "whole tensors", "packed projections", "experts apart in files")
"""Kinds whose logits are compared too."""


def write_adapter(base: Path, target: Path, config: PeftConfig) -> PeftModel:
    """Adapters and whole tensors, none of them as the base has it, written by PEFT's `save_pretrained`."""
    model = get_peft_model(tiny.hugging_face(base), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
            elif parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(target)
    return model.eval()


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings})


def merged_on_disk(model: PeftModel) -> dict[str, Tensor]:
    """The weights of PEFT's merged model under the names of files."""
    merged = model.merge_and_unload()
    return tiny.as_on_disk(dict(merged.state_dict()), merged.config.model_type)


def logits_of(model: torch.nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits[0] for row in TOKENS]


def linked(base: Path, adapter: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copyfile(base / "config.json", folder / "config.json")
    link_merged(folder, base, adapter)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_that_of_the_model_that_peft_merges(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    family, settings = KINDS[kind]
    theirs = merged_on_disk(write_adapter(folders[family], tmp_path / "adapter", lora(**settings)))
    with MergedReader(folders[family], tmp_path / "adapter") as ours, SafetensorsReader(folders[family]) as base:
        WeightMap(ModelConfig.from_hf_folder(folders[family])).check(ours)
        changed = [name for name in ours.keys() if not torch.equal(ours.get(name), base.get(name))]
        assert changed
        for name in ours.keys():
            torch.testing.assert_close(ours.get(name), theirs[name], rtol=0, atol=2e-6)
            assert (name in changed) == (str(tmp_path / "adapter") in ours.source(name))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ON_A_RANK)
def test_logits_are_those_of_peft_beside_the_base_and_merged(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    family, settings = KINDS[kind]
    theirs = write_adapter(folders[family], tmp_path / "adapter", lora(**settings))
    beside = logits_of(theirs)
    folder = linked(folders[family], tmp_path / "adapter", tmp_path / "start")
    with open_weights(folder) as weights:
        model = build_model(ModelConfig.from_hf_folder(folder), LayoutSpec(), torch.float32, weights=weights).eval()
    ours = row_logits(model, TOKENS)
    assert ours is not None
    for mine, unmerged, merged in zip(ours, beside, logits_of(theirs.merge_and_unload()), strict=True):
        room = 1e-5 * max(1.0, float(merged.abs().max()))
        assert float((mine - unmerged).abs().max()) <= room and float((mine - merged).abs().max()) <= room


def save_gpt2(folder: Path) -> Path:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["c_attn", "c_proj"], "use_dora": True}, {"target_modules": ["c_proj"]}],
    ids=["some", "square"],
)
def test_matrices_of_gpt2_lie_the_other_way_round(settings: dict[str, Any], tmp_path: Path) -> None:
    """One of `c_proj` is square: its shape does not say which way."""
    base = save_gpt2(tmp_path / "base")
    theirs = merged_on_disk(write_adapter(base, tmp_path / "adapter", lora(**settings)))
    with MergedReader(base, tmp_path / "adapter") as ours:
        for name in ours.keys():
            torch.testing.assert_close(ours.get(name), theirs[name], rtol=0, atol=2e-6)


def test_sums_are_float32_and_tensors_of_the_base_type(folders: dict[str, Path], tmp_path: Path) -> None:
    write_adapter(folders["llama"], tmp_path / "adapter", lora(target_modules=["q_proj"], modules_to_save=["norm"]))
    halved = tmp_path / "base"
    shutil.copytree(folders["llama"], halved)
    whole = {name: tensor.bfloat16() for name, tensor in load_file(halved / "model.safetensors").items()}
    save_file(whole, halved / "model.safetensors", {"format": "pt"})
    with MergedReader(halved, tmp_path / "adapter") as ours:
        assert {ours.get(name).dtype for name in ours.keys()} == {torch.bfloat16}
        name = "model.layers.1.self_attn.q_proj"
        pair = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        a, b = (pair[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        assert torch.equal(ours.get(f"{name}.weight"), (whole[f"{name}.weight"].float() + 1.5 * (b @ a)).bfloat16())


def test_no_reader_takes_a_linked_folder_for_the_base(folders: dict[str, Path], tmp_path: Path) -> None:
    write_adapter(folders["llama"], tmp_path / "adapter", lora(target_modules=["q_proj"]))
    folder = linked(folders["llama"], tmp_path / "adapter", tmp_path / "start")
    assert isinstance(open_weights(folder), MergedReader)
    assert isinstance(open_weights(folders["llama"]), SafetensorsReader)
    with pytest.raises(InputError, match="has neither model.safetensors nor"):
        SafetensorsReader(folder)
    with pytest.raises(OSError, match="no file named"):
        tiny.hugging_face(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["biases", "packed projections", "whole tensors"])
def test_the_check_passes_over_two_by_two_ranks(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    family, settings = KINDS[kind]
    write_adapter(folders[family], tmp_path / "adapter", lora(**settings))
    report = check_folder(folders[family], tp=2, pp=2, adapter=tmp_path / "adapter")
    assert report.ok and report.round_trip_equal, report


@pytest.mark.slow
def test_the_check_passes_over_ranks_of_experts(folders: dict[str, Path], tmp_path: Path) -> None:
    family, settings = KINDS["experts apart in files"]
    write_adapter(folders[family], tmp_path / "adapter", lora(**settings))
    assert check_folder(folders[family], tp=2, ep=2, adapter=tmp_path / "adapter").ok


def with_setting(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))

    return change


def with_tensors(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return made


def renamed(tensors: dict[str, Tensor]) -> None:
    for key in [key for key in tensors if ".layers.2." in key]:
        tensors[key.replace(".layers.2.", ".layers.7.")] = tensors.pop(key)


REFUSED: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "biases": (with_setting("bias", "all"), r"adapter_config.json: `bias` is \"all\": adapters with trained biases are not read"),
    "pissa": (with_setting("init_lora_weights", "pissa_niter_4"), r"`init_lora_weights` is \"pissa_niter_4\": it changed the base's weights as well"),
    "tokens": (with_setting("trainable_token_indices", [3]), r"`trainable_token_indices` is \[3\]: single rows of embeddings"),
    "invocation": (with_setting("alora_invocation_tokens", [3]), r"`alora_invocation_tokens` is \[3\]: these adapters work behind those tokens"),
    "layers": (with_setting("layer_replication", [[0, 2]]), r"`layer_replication` is \[\[0, 2\]\]: the base has other layers"),
    "later": (with_setting("use_next_year", True), "`use_next_year` is true: this package does not know what it means"),
    "other kind": (with_setting("peft_type", "ADALORA"), "`peft_type` is 'ADALORA', and only LORA can be merged"),
    "no number": (with_setting("lora_alpha", "big"), "`lora_alpha` is 'big': Input should be a valid number"),
    "rank": (with_setting("r", 8), r"has shape \[4, 64\], and adapter_config.json a rank of 8 there"),
    "lengths": (with_setting("use_dora", True), "`use_dora` is true, and adapter_model.safetensors has no lora_magnitude_vector beside"),
    "unsaved": (with_setting("modules_to_save", ["lm_head"]), "`modules_to_save` has 'lm_head', of which adapter_model.safetensors has no tensor"),
    "pattern": (with_setting("rank_pattern", {"q_(": 2}), r"the pattern 'q_\(' is no regular expression"),
    "json": (lambda folder: (folder / "adapter_config.json").write_text("{") and None, "adapter_config.json is not valid JSON"),
    "half a pair": (with_tensors(lambda t: t.pop(KEY) is None), "without its lora_A"),
    "half a file": (with_tensors(lambda t: [t.pop(KEY.replace("_A.", f"_{x}.")) for x in "AB"] and None), "has no adapters of model.layers.1.self_attn.q_proj, which `target_modules`"),
    "no place": (with_tensors(renamed), "2 of 6 adapters belong to no tensor of .*llama: base_model.model.model.layers.7"),
    "shape": (with_tensors(lambda t: t.update({KEY: torch.zeros(4, 9)})), r"have shapes \[4, 9\] and \[64, 4\], which do not fit 'model.layers.1.self_attn.q_proj.weight' of the base, \[64, 64\]"),
    "prefix": (with_tensors(lambda t: t.update({"model.norm.weight": torch.ones(64)})), "'model.norm.weight' does not begin with 'base_model.model.'"),
    "whole shape": (with_tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(140, 64)})), r"'base_model.model.lm_head.weight' has shape \[140, 64\], and 'lm_head.weight' of .*llama \[131, 64\]"),
    "whole place": (with_tensors(lambda t: t.update({"base_model.model.score.weight": torch.ones(1, 64)})), "is to take the place of 'score.weight', which .*llama does not have"),
    "empty": (with_tensors(lambda t: t.clear()), "holds no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_headers(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    change, words = REFUSED[case]
    write_adapter(folders["llama"], tmp_path / "adapter", lora(target_modules=["q_proj", "v_proj"]))
    change(tmp_path / "adapter")
    with pytest.raises(InputError, match=words):
        MergedReader(folders["llama"], tmp_path / "adapter")


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["ia3", "prefix"],
)
def test_other_kinds_of_adapters_are_refused(config: PeftConfig, folders: dict[str, Path], tmp_path: Path) -> None:
    write_adapter(folders["llama"], tmp_path / "adapter", config)
    with pytest.raises(InputError, match="and only LORA can be merged into a base"):
        MergedReader(folders["llama"], tmp_path / "adapter")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "changes the embedding alone"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            "'lm_head.weight', which .*llama_tied does not",
        ),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head.weight', which .*llama_tied does not have"),
    ],
)
def test_half_of_a_tied_pair_is_refused(
    settings: dict[str, Any], words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT trains a copy of one of the two, and no tied model is both."""
    write_adapter(folders["llama_tied"], tmp_path / "adapter", lora(**settings))
    with pytest.raises(InputError, match=words):
        MergedReader(folders["llama_tied"], tmp_path / "adapter")
