"""Prefix tuning on ranks: PEFT's log-probs, gradient and files at any layout, in the embedded engine too; at the start a prefix of real tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.prefix import PrefixMap, as_peft, check_prefix
from nemo_rl_like.model.scratch import generator_of
from nemo_rl_like.policy.store import write_adapter_config
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec, PrefixTuningSpec, RecomputeSpec
from tests.model import tiny
from tests.policy.ranks import export_adapter, run_ranks
from tests.policy.test_laws import make_batch, make_folder
from tests.policy.test_lora_laws import Folders, by_peft, largest, steps
from tests.policy.virtual_ranks import Found, check_samples, one_rank, sampled

TUNED = PrefixTuningSpec(tokens=5)
ONE_RANK = (
    PolicySpec(adapter=TUNED),
    PolicySpec(adapter=TUNED, micro_batch_tokens=24, recompute=RecomputeSpec()),
    PolicySpec(adapter=TUNED, rows="packed", micro_batch_tokens=24),
    PolicySpec(adapter=TUNED, rows="padded", micro_batch_tokens=60),
)
TWO_RANKS = (LayoutSpec(dp=2), LayoutSpec(tp=2), LayoutSpec(tp=2, sp=True), LayoutSpec(cp=2), LayoutSpec(pp=2, vpp=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A base, random prefixes as a checkpoint's section, and the same written for PEFT."""
    root = tmp_path_factory.mktemp("prefix")
    base = make_folder(root / "base")
    config = ModelConfig.from_hf_folder(base)
    torch.manual_seed(4)
    drawn = {name: 0.5 * torch.randn(shape) for name, shape in PrefixMap(config, TUNED).hf_shapes().items()}
    (root / "checkpoint" / ADAPTER).mkdir(parents=True)
    save_file(drawn, root / "checkpoint" / ADAPTER / "model.safetensors")
    write_adapter_config(root / "checkpoint" / ADAPTER / "adapter_config.json", TUNED, config, base)
    (root / "checkpoint" / "weights").mkdir()
    export_adapter(root / "checkpoint", root / "peft")
    return Folders(base, root / "peft", root / "checkpoint")


def peft_of(folders: Folders) -> PeftModel:
    """In float64, with gradients of the prefix."""
    model = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(folders.base, dtype=torch.float32), folders.peft
    ).double()
    model.prompt_encoder.requires_grad_(True)
    return model


def check(made: list[dict[str, Any]], folders: Folders) -> None:
    batch = make_batch()
    flat, loss, found = by_peft(peft_of(folders), batch)
    gradient = found["prompt_encoder.embedding.weight"]
    base = LlamaForCausalLM.from_pretrained(folders.base, dtype=torch.float64)
    names = {name for name in base.state_dict() if name != "lm_head.weight"}
    plain, _, _ = by_peft(base, batch)
    behind, _, _ = by_peft(BehindTokens(base), batch)
    for got in made:
        assert float((got["base"] - plain).abs().max()) <= 1e-5 and torch.equal(got["base"], got["base again"])
        assert float((got["start"] - behind).abs().max()) <= 1e-5 < float((behind - plain).abs().max())
        assert float((got["log-probs"] - flat).abs().max()) <= 1e-5 < float((flat - plain).abs().max())
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert got["metrics"]["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
        assert float((as_peft(got["gradients"]) - gradient).abs().max()) <= 1e-5
        assert largest(got["merged"], {name: base.state_dict()[name].float() for name in names}) == 0
        assert got["again"][0] == got["again"][1]


class BehindTokens(torch.nn.Module):
    """The model behind the tokens that prefixes start as, drawn with the seed of `member`."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.before = torch.randint(97, (1, TUNED.tokens), generator=generator_of(5, "prefix."))

    def forward(self, ids: torch.Tensor) -> Any:
        out = self.model(torch.cat([self.before, ids], dim=1))
        out.logits = out.logits[:, TUNED.tokens :]
        return out


def test_prefixes_are_pefts_for_any_rows(folders: Folders, found: Found, tmp_path: Path) -> None:
    made = found[0]
    check(made, folders)
    export_adapter(made[0]["folder"], tmp_path / "peft")
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert said["peft_type"] == "PREFIX_TUNING" and said["num_virtual_tokens"] == TUNED.tokens
    base = LlamaForCausalLM.from_pretrained(folders.base, dtype=torch.float32)
    fresh = get_peft_model(base, PrefixTuningConfig(num_virtual_tokens=TUNED.tokens, task_type="CAUSAL_LM"))
    fresh.save_pretrained(tmp_path / "fresh")
    shapes = [
        {n: t.shape for n, t in load_file(tmp_path / x / "adapter_model.safetensors").items()}
        for x in ("peft", "fresh")
    ]
    assert shapes[0] == shapes[1]


def test_prefixes_are_pefts_over_two_ranks(folders: Folders, tmp_path: Path) -> None:
    check(run_ranks(steps, 2, tmp_path, folders, [PolicySpec(layout=x, adapter=TUNED) for x in TWO_RANKS]), folders)


@pytest.fixture(scope="module")
def found(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Found:
    made: Found = run_ranks(one_rank, 1, tmp_path_factory.mktemp("one"), folders, list(ONE_RANK))
    return made


def test_the_embedded_engine_samples_behind_prefixes(folders: Folders, found: Found) -> None:
    check_samples(found[1], peft_of(folders))


@pytest.mark.slow
def test_the_embedded_engine_samples_behind_prefixes_over_two_ranks(folders: Folders, tmp_path: Path) -> None:
    policy = PolicySpec(layout=LayoutSpec(tp=2, sp=True), adapter=TUNED)
    check_samples(run_ranks(sampled, 2, tmp_path, folders, policy), peft_of(folders))


def test_a_model_that_cannot_have_prefixes_is_refused(folders: Folders, tmp_path: Path) -> None:
    raw = json.loads((folders.base / "config.json").read_text())
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    windowed = ModelConfig.from_hf_dict({**raw, **mistral})
    with pytest.raises(InputError, match="attend within 8 tokens"):
        check_prefix(windowed, TUNED)
    tiny.make_model("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has latent attention.*use prompt_tuning"):
        check_prefix(ModelConfig.from_hf_folder(tmp_path), TUNED)
    with pytest.raises(InputError, match=r"policy.adapter.tokens is 64, which leaves no room"):
        check_prefix(ModelConfig.from_hf_folder(folders.base), PrefixTuningSpec(tokens=64))
