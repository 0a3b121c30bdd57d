"""Prompt tuning on ranks: PEFT's log-probs, gradient and files at any layout, in the embedded engine too; off, the model is its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.model.virtual_tokens import PROMPT
from nemo_rl_like.policy.store import kept_beside
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec, PromptTuningSpec, RecomputeSpec
from tests.policy.ranks import export_adapter, run_ranks
from tests.policy.test_laws import make_batch, make_folder
from tests.policy.test_lora_laws import Folders, by_peft, largest, steps
from tests.policy.virtual_ranks import Found, check_samples, one_rank, sampled

TUNED = PromptTuningSpec(tokens=5)
ONE_RANK = (
    PolicySpec(adapter=TUNED),
    PolicySpec(adapter=TUNED, micro_batch_tokens=24, recompute=RecomputeSpec()),
    PolicySpec(adapter=TUNED, rows="packed", micro_batch_tokens=24),
    PolicySpec(adapter=TUNED, rows="padded", micro_batch_tokens=60),
)
TWO_RANKS = (LayoutSpec(dp=2), LayoutSpec(tp=2), LayoutSpec(tp=2, sp=True), LayoutSpec(cp=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A base, and random virtual tokens written by PEFT."""
    root = tmp_path_factory.mktemp("prompt")
    base = make_folder(root / "base")
    config = PromptTuningConfig(num_virtual_tokens=TUNED.tokens, task_type="CAUSAL_LM")
    torch.manual_seed(4)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.prompt_encoder["default"].embedding.weight.data.normal_(std=0.3)
    model.save_pretrained(root / "peft")
    (root / "checkpoint" / ADAPTER).mkdir(parents=True)
    save_file(
        load_file(root / "peft" / "adapter_model.safetensors"), root / "checkpoint" / ADAPTER / "model.safetensors"
    )
    return Folders(base, root / "peft", root / "checkpoint")


class Shifted(torch.nn.Module):
    """PEFT's model in float64, whose logits begin at a row's first own token."""

    def __init__(self, folders: Folders) -> None:
        super().__init__()
        base = LlamaForCausalLM.from_pretrained(folders.base, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, folders.peft).double()
        self.model.prompt_encoder.requires_grad_(True)

    def forward(self, ids: torch.Tensor) -> Any:
        out = self.model(input_ids=ids)
        out.logits = out.logits[:, TUNED.tokens :]
        return out


def check(made: list[dict[str, Any]], folders: Folders) -> None:
    batch = make_batch()
    flat, loss, found = by_peft(Shifted(folders), batch)
    gradients = {PROMPT: found["model.prompt_encoder.embedding.weight"]}
    base = LlamaForCausalLM.from_pretrained(folders.base, dtype=torch.float32)
    names = {name for name in base.state_dict() if name != "lm_head.weight"}
    plain, _, _ = by_peft(LlamaForCausalLM.from_pretrained(folders.base, dtype=torch.float64), batch)
    for got in made:
        rows = got["drawn"][PROMPT]
        assert all((base.model.embed_tokens.weight == row).all(1).any() for row in rows) and len(rows) == TUNED.tokens
        assert torch.equal(rows, made[0]["drawn"][PROMPT])
        assert float((got["base"] - plain).abs().max()) <= 1e-5 and torch.equal(got["base"], got["base again"])
        assert float((got["log-probs"] - flat).abs().max()) <= 1e-5 < float((got["start"] - flat).abs().max())
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert got["metrics"]["grad_norm"] == pytest.approx(float(gradients[PROMPT].norm()), rel=1e-5)
        assert largest(got["gradients"], gradients) <= 1e-5
        assert largest(got["merged"], {name: base.state_dict()[name] for name in names}) == 0
        assert got["again"][0] == got["again"][1]


def test_virtual_tokens_are_pefts_for_any_rows(folders: Folders, found: Found, tmp_path: Path) -> None:
    check(found[0], folders)
    checkpoint = found[0][0]["folder"]
    assert kept_beside(checkpoint) == "virtual tokens"
    export_adapter(checkpoint, tmp_path / "peft")
    trained = Shifted(Folders(folders.base, tmp_path / "peft", checkpoint)).model.prompt_encoder["default"].embedding
    assert torch.equal(trained.weight.float(), load_file(tmp_path / "peft" / "adapter_model.safetensors")[PROMPT])


def test_virtual_tokens_are_pefts_over_two_ranks(folders: Folders, tmp_path: Path) -> None:
    check(run_ranks(steps, 2, tmp_path, folders, [PolicySpec(layout=x, adapter=TUNED) for x in TWO_RANKS]), folders)


@pytest.fixture(scope="module")
def found(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Found:
    made: Found = run_ranks(one_rank, 1, tmp_path_factory.mktemp("one"), folders, list(ONE_RANK))
    return made


def test_the_embedded_engine_samples_behind_virtual_tokens(folders: Folders, found: Found) -> None:
    check_samples(found[1], Shifted(folders))


@pytest.mark.slow
def test_the_embedded_engine_samples_behind_virtual_tokens_over_two_ranks(folders: Folders, tmp_path: Path) -> None:
    policy = PolicySpec(layout=LayoutSpec(tp=2, sp=True), adapter=TUNED)
    check_samples(run_ranks(sampled, 2, tmp_path, folders, policy), Shifted(folders))
