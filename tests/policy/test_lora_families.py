"""Adapters on latent attention (DeepSeek-V2 and V3), and on attention with sinks and biases (GPT-OSS): PEFT's at any layout, as Llama's are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.policy.store import write_adapter_config
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec, PolicySpec, RecomputeSpec
from tests.model import tiny
from tests.policy.ranks import export_adapter, run_ranks
from tests.policy.test_lora_laws import Folders, check, each, largest, make_adapters, peft_of, steps
from tests.policy.virtual_ranks import Found, check_samples, one_rank, sampled

V3 = LoraSpec(rank=3, alpha=4.0, targets=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
V3_DORA = LoraSpec(rank=3, alpha=4.0, dora=True, targets=("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
V2 = LoraSpec(rank=2, alpha=4.0, rslora=True, targets=("q_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
GPT_OSS = LoraSpec(rank=3, alpha=4.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
GPT_OSS_DORA = GPT_OSS.model_copy(update={"dora": True})
EXPERTS = LoraSpec(rank=3, alpha=4.0, rslora=True, targets=("q_proj", "gate_up_proj", "down_proj"))
DOWN = LoraSpec(rank=2, alpha=4.0, targets=("o_proj", "down_proj"))
SP = LayoutSpec(tp=2, sp=True, etp=1)
MORE_RANKS = (LayoutSpec(pp=2), LayoutSpec(dp=2, ep=2), LayoutSpec(tp=2, sp=True, ep=2, etp=1))
CASES = {
    "v3": ("deepseek_v3", V3),
    "v3 dora": ("deepseek_v3", V3_DORA),
    "v2": ("deepseek_v2", V2),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss dora": ("gpt_oss", GPT_OSS_DORA),
    "gpt_oss experts": ("gpt_oss", EXPERTS),
    "gpt_oss down": ("gpt_oss", DOWN),
}


def make(root: Path, name: str) -> tuple[Folders, LoraSpec]:
    family, lora = CASES[name]
    tiny.make_model(family).save_pretrained(root / "base")
    stacked = [f"mlp.experts.{x}" for x in lora.targets if family == "gpt_oss" and x in ("gate_up_proj", "down_proj")]
    return make_adapters(root, root / "base", lora, std=0.1, parameters=stacked or None), lora


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "v2", "gpt_oss", "gpt_oss experts"])
def test_they_are_pefts_for_any_rows(name: str, tmp_path: Path) -> None:
    folders, lora = make(tmp_path, name)
    policies = [
        PolicySpec(lora=lora),
        PolicySpec(lora=lora, rows="packed", micro_batch_tokens=24, recompute=RecomputeSpec()),
    ]
    found: Found = run_ranks(one_rank, 1, tmp_path, folders, policies)
    check(found[0], (folders, lora))
    check_samples(found[1], peft_of(folders))


@pytest.mark.slow
def test_they_are_pefts_over_two_ranks(tmp_path: Path) -> None:
    layouts = (SP, LayoutSpec(cp=2))
    made = [make(tmp_path / name, name) for name in CASES]
    cases = [(folders, [PolicySpec(layout=x, lora=lora) for x in layouts]) for folders, lora in made]
    for case, found in zip(made, run_ranks(each, 2, tmp_path, cases), strict=True):
        check(found, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "v3 dora", "gpt_oss experts"])
def test_they_are_pefts_in_more_layouts(name: str, tmp_path: Path) -> None:
    folders, lora = make(tmp_path, name)
    check(
        run_ranks(steps, 2, tmp_path, folders, [PolicySpec(layout=x, lora=lora) for x in MORE_RANKS]), (folders, lora)
    )


@pytest.mark.parametrize("name", ["gpt_oss experts", "gpt_oss down"])
def test_peft_loads_what_is_exported_of_stacked_experts(name: str, tmp_path: Path) -> None:
    """From the checkpoint's own form, with names and shapes as PEFT writes them, and the same logits."""
    folders, lora = make(tmp_path, name)
    config = ModelConfig.from_hf_folder(folders.base)
    write_adapter_config(folders.checkpoint / ADAPTER / "adapter_config.json", lora, config, folders.base)
    (folders.checkpoint / "weights").mkdir()
    export_adapter(folders.checkpoint, tmp_path / "export")
    ours, theirs = (load_file(x / "adapter_model.safetensors") for x in (tmp_path / "export", folders.peft))
    assert largest(ours, theirs) == 0
    ids = torch.arange(20)[None]
    exported, plain = replace(folders, peft=tmp_path / "export"), tiny.hugging_face(folders.base, torch.float64)
    said, want = (peft_of(x)(ids).logits for x in (exported, folders))
    assert torch.equal(said, want) and float((want - plain(ids).logits).abs().max()) > 0.1


@pytest.mark.slow
def test_dropped_inputs_of_latent_attention_are_the_same_over_two_ranks(tmp_path: Path) -> None:
    """Masks are told by token, so the step's gradients are those of one rank."""
    folders, _ = make(tmp_path, "v3")
    lora = V3.model_copy(update={"dropout": 0.3})
    one, whole = run_ranks(steps, 1, tmp_path, folders, [PolicySpec(lora=lora), PolicySpec(lora=V3)])
    (two,) = run_ranks(steps, 2, tmp_path, folders, [PolicySpec(layout=SP, lora=lora)])
    for name, gradient in one["gradients"].items():
        assert float((two["gradients"][name] - gradient).abs().max()) <= 1e-5, name
    assert one["metrics"]["loss"] != pytest.approx(whole["metrics"]["loss"], abs=1e-4)


@pytest.mark.slow
def test_the_embedded_engine_samples_with_them_over_two_ranks(tmp_path: Path) -> None:
    folders, lora = make(tmp_path, "v3")
    check_samples(run_ranks(sampled, 2, tmp_path, folders, PolicySpec(layout=SP, lora=lora)), peft_of(folders))
