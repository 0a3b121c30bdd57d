"""DoRA beside a bias: PEFT's log-probs, and the base's own bits as long as the adapters are new, in bfloat16 too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.model.lora import adapters_off, lengths_held
from nemo_rl_like.policy.rank import PolicyRank, Walk
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec, PolicySpec
from tests.model import tiny
from tests.policy.ranks import context_of, run_ranks
from tests.policy.test_laws import make_batch

LORA = LoraSpec(rank=2, alpha=3.0, dora=True, targets=("q_proj", "v_proj", "o_proj", "gate_proj"))


def make(root: Path) -> Path:
    """A base with biases, and PEFT's random adapters beside it."""
    tiny.make_model("qwen2").save_pretrained(root / "base")
    config = LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, use_dora=True, target_modules=list(LORA.targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(Qwen2ForCausalLM.from_pretrained(root / "base", dtype=torch.float32), config)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter + torch.empty_like(parameter).normal_(std=0.2)
    model.save_pretrained(root / "peft")
    (root / ADAPTER).mkdir()
    save_file(load_file(root / "peft" / "adapter_model.safetensors"), root / ADAPTER / "model.safetensors")
    return root


def found(rank: int, world: int, port: int, root: Path, layout: LayoutSpec) -> dict[str, Any]:
    policy, batch = PolicySpec(layout=layout, lora=LORA), make_batch()
    rows = batch.trained_per_row > 0
    out: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        place = context_of(layout, rank, world, port)
        this = PolicyRank(place, folder=str(root / "base"), policy=policy, dtype=dtype, adapter_seed=5)
        out[f"new {dtype}"] = this._walk(batch, rows, Walk(1.0), training=False).logprobs
        with adapters_off(this.model):
            out[f"base {dtype}"] = this._walk(batch, rows, Walk(1.0), training=False).logprobs
    this.load(str(root), None)
    out["loaded"] = this._walk(batch, rows, Walk(1.0), training=False).logprobs
    with lengths_held(this.model):
        out["held"] = this._walk(batch, rows, Walk(1.0), training=False).logprobs
        for parameter in this.model.parameters():
            parameter.data *= 2  # which lengths computed again would show
        changed = this._walk(batch, rows, Walk(1.0), training=False).logprobs
    out["seen"] = not torch.equal(this._walk(batch, rows, Walk(1.0), training=False).logprobs, changed)
    return out


@pytest.mark.parametrize("layout", [LayoutSpec(), LayoutSpec(tp=2)], ids=["one rank", "two ranks"])
def test_dora_beside_a_bias_is_pefts_and_starts_as_the_base(tmp_path: Path, layout: LayoutSpec) -> None:
    got = run_ranks(found, layout.ranks, tmp_path, make(tmp_path), layout)
    for dtype in ("bfloat16", "float32"):
        assert torch.equal(got[f"new {dtype}"], got[f"base {dtype}"])
    assert torch.equal(got["held"], got["loaded"]) and got["seen"]
    base = Qwen2ForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    model, batch = PeftModel.from_pretrained(base, tmp_path / "peft").double(), make_batch()
    want = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        ids = batch.tokens[start:end]
        table = model(ids[None]).logits[0, :-1].log_softmax(-1).detach()
        want[start + 1 : end] = table[torch.arange(end - start - 1), ids[1:]]
    assert float((got["loaded"] - want)[batch.loss_mask].abs().max()) <= 1e-5
    assert float((got["loaded"] - got["base float32"])[batch.loss_mask].abs().max()) > 1e-2
