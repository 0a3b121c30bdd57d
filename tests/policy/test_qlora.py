"""Adapters on a base in NF4: at any layout the log-probs, gradients and merged model of PEFT on what bitsandbytes makes of the base's matrices."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.model.base_bytes import base_bytes
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.nf4 import Nf4Weight
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec, Nf4Spec, PolicySpec, RecomputeSpec
from tests.model import tiny
from tests.policy.ranks import run_ranks
from tests.policy.test_laws import VOCAB, make_batch
from tests.policy.test_lora_laws import Folders, check, largest, log_probs, make_adapters, member, peft_of, steps
from tests.policy.virtual_ranks import check_samples, sampled

LORA = LoraSpec(rank=4, alpha=6.0, base=Nf4Spec(double=False))
DORA = LoraSpec(rank=3, alpha=4.0, dora=True, base=Nf4Spec(double=False))
DOUBLE = LORA.model_copy(update={"base": Nf4Spec()})
TWO_RANKS = (
    LayoutSpec(tp=2, sp=True),
    LayoutSpec(tp=2),
    LayoutSpec(pp=2),
    LayoutSpec(dp=2),
    LayoutSpec(cp=2),
    LayoutSpec(pp=2, vpp=2),
)


def dequantised(base: Path, target: Path) -> Path:
    """The model whose layers' matrices are what bitsandbytes' NF4 stands for."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for name, module in model.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                before = module.weight.clone()
                module.weight.copy_(bnb.dequantize_4bit(*bnb.quantize_4bit(before, blocksize=64, quant_type="nf4")))
                assert 0.05 < float((module.weight - before).norm() / before.norm()) < 0.15, name
    model.save_pretrained(target)
    return target


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Adapters of `LORA`."""
    return make(tmp_path / "qlora", LORA)


def make(root: Path, lora: LoraSpec) -> Folders:
    """A base two tensor-parallel ranks of which have whole blocks, and random adapters by PEFT."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(2)
    LlamaForCausalLM(config).save_pretrained(root / "base")
    dequantised(root / "base", root / "dequantised")
    return make_adapters(root, root / "base", lora, std=0.1)


def on_dequantised(folders: Folders) -> Folders:
    return replace(folders, base=folders.base.parent / "dequantised")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["lora", "dora"])
def test_they_are_pefts_on_the_dequantised_base_for_any_rows(lora: LoraSpec, tmp_path: Path) -> None:
    folders = make(tmp_path / "qlora", lora)
    policies = [
        PolicySpec(lora=lora),
        PolicySpec(lora=lora, rows="packed", micro_batch_tokens=24, recompute=RecomputeSpec()),
    ]
    made, samples = run_ranks(trained_and_sampled, 1, tmp_path, folders, policies)
    check(made, (on_dequantised(folders), lora))
    check_samples(samples, peft_of(on_dequantised(folders)))


def trained_and_sampled(
    rank: int, world: int, port: int, folders: Folders, policies: list[PolicySpec]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return steps(rank, world, port, folders, policies), sampled(rank, world, port, folders, policies[0])


@pytest.mark.slow
def test_they_are_pefts_over_two_ranks(folders: Folders, tmp_path: Path) -> None:
    policies = [PolicySpec(layout=x, lora=LORA) for x in TWO_RANKS]
    check(run_ranks(steps, 2, tmp_path, folders, policies), (on_dequantised(folders), LORA))


def merged_base(rank: int, world: int, port: int, folders: Folders, policies: list[PolicySpec]) -> list[dict[str, Any]]:
    """What each policy's base stands for, and the bytes of it here and by the estimate."""
    out = []
    for policy in policies:
        this = member(rank, world, port, folders, policy)
        whole = {name: tensor.clone() for name, tensor in this.backend.weights() if tensor is not None}
        alive = most_alive(this)
        out.append({"whole": whole, "bytes": held_bytes(this), "told": told_bytes(folders, policy), "alive": alive})
    return out


def most_alive(this: PolicyRank) -> int:
    """Matrices whose values are in memory when those of another are made, in a step of training and its log-probs."""
    found: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []
    dequantized = Nf4Weight.dequantized

    def watched(weight: Nf4Weight) -> torch.Tensor:
        found.append(sum(of() is not None for of in made))
        values = dequantized(weight)
        made.append(weakref.ref(values))
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nf4Weight, "dequantized", watched)
        this.train_step(make_batch(), None, CrossEntropy())
        log_probs(this, make_batch())
    assert len(found) > 2 * sum(isinstance(p, Nf4Weight) for p in this.model.parameters())  # type: ignore[attr-defined]
    return max(found)


def held_bytes(this: PolicyRank) -> int:
    """Of every tensor of the frozen base on this rank."""
    frozen = [p for _, p in this.model.named_parameters() if not p.requires_grad]  # type: ignore[attr-defined]
    return sum(p.bytes if isinstance(p, Nf4Weight) else p.nbytes for p in frozen)


def told_bytes(folders: Folders, policy: PolicySpec) -> int:
    assert policy.lora is not None
    return base_bytes(ModelConfig.from_hf_folder(folders.base), policy.layout, 0, "float32", policy.lora.base)


@pytest.mark.slow
def test_the_base_is_the_same_in_any_layout_and_takes_what_the_estimate_says(folders: Folders, tmp_path: Path) -> None:
    one = run_ranks(merged_base, 1, tmp_path, folders, [PolicySpec(lora=x) for x in (LORA, DOUBLE)])
    layouts = (LayoutSpec(tp=2, sp=True), LayoutSpec(pp=2))
    two = run_ranks(merged_base, 2, tmp_path, folders, [PolicySpec(layout=x, lora=DOUBLE) for x in layouts])
    plain, double = (found["whole"] for found in one)
    for name, tensor in double.items():
        assert all(torch.equal(found["whole"][name], tensor) for found in two), name
        apart = float((tensor - plain[name]).norm() / plain[name].norm())
        assert (0 < apart < 0.02) if name.endswith("proj.weight") else apart == 0, name
    assert all(found["bytes"] == found["told"] and found["alive"] == 0 for found in (*one, *two))
    matrices = sum(t.numel() for name, t in plain.items() if name.endswith("proj.weight"))
    others = sum(t.nbytes for name, t in plain.items() if not name.endswith("proj.weight"))
    bits = [8 * (found["bytes"] - others) / matrices for found in one]
    assert bits[0] == 4.5 and 4.125 < bits[1] < 4.125 + 32 / 128  # 4 bytes of a row, which has 128 or 256 inputs


@pytest.mark.slow
def test_experts_matrices_are_in_nf4_too(tmp_path: Path) -> None:
    """Each expert's by itself, over expert-parallel ranks and those that cut an expert; routers are not."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=128, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(2)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    want = tiny.as_on_disk(model.state_dict(), "qwen3_moe")
    for name in (name for name in want if name.endswith("proj.weight")):
        want[name] = bnb.dequantize_4bit(*bnb.quantize_4bit(want[name], blocksize=64, quant_type="nf4"))
    folders = Folders(tmp_path / "base", tmp_path, tmp_path)
    layouts = (LayoutSpec(dp=2, ep=2), LayoutSpec(tp=2, sp=True), LayoutSpec(tp=2, sp=True, ep=2, etp=1))
    for found in run_ranks(merged_base, 2, tmp_path, folders, [PolicySpec(layout=x, lora=LORA) for x in layouts]):
        assert largest(found["whole"], want) == 0 and found["bytes"] == found["told"]


def test_fp8_products_of_such_a_base_are_refused() -> None:
    with pytest.raises(ValidationError, match="`lora.base` holds their matrices in NF4"):
        PolicySpec.model_validate({"fp8": {}, "lora": {"base": {"kind": "nf4"}}})
