"""vLLM takes over the weights of models of every family, and gives their log-probs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.probe import check_gap, probe_gap, probe_prompts
from nemo_rl_like.generation.vllm import VllmEngine
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.merged_reader import link_merged
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.weights.shared_memory import SharedMemorySender
from tests.model.tiny import as_on_disk

from .tiny_models import VOCAB, scores

pytestmark = [pytest.mark.service, pytest.mark.slow]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2}
WINDOW = 16
"""Shorter than the probes."""
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=4, sliding_window=None),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=64, norm_topk_prob=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "phi3": Phi3Config(**SHAPE, partial_rotary_factor=0.5),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=24, final_logit_softcapping=3.0),
    "gemma3_text": Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, sliding_window_pattern=2),
    "nemotron": NemotronConfig(**SHAPE),
}


def make(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(0.0, 0.1)
    return model.eval()


def write(model: PreTrainedModel, folder: Path) -> None:
    """A Hugging Face folder with the config.json that this package writes."""
    model.save_pretrained(folder)
    config = ModelConfig.from_hf_folder(folder)
    (folder / "config.json").write_text(json.dumps(config.to_hf_dict()), encoding="utf-8")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", CONFIGS)
def test_an_engine_has_the_log_probs_of_a_family_before_and_after_updates(family: str, tmp_path: Path) -> None:
    first = make(family, 0)
    write(first, tmp_path / "model")
    engine = VllmEngine(
        RankContext("engine", 0, 1, {"dp": 1}, {"dp": 0}, "127.0.0.1", 0, 1, tmp_path / "log", "localhost"),
        model_folder=str(tmp_path / "model"),
        dtype="float32",
        engine=EngineSpec(kind="vllm", kv_cache_gib=0.02, max_batch_rows=16, max_context=160),
    )
    sender, probes = SharedMemorySender(), list(probe_prompts(VOCAB, count=8, tokens=64))
    try:
        check_gap(probe_gap(engine.score(probes), scores(first, probes)), 1e-3, "the folder's weights")
        for version in (1, 2):
            model = make(family, version)
            weights = as_on_disk({name: p.detach() for name, p in model.named_parameters()}, family)
            engine.update_weights(version, sender.publish(version, weights.items()))
            check_gap(probe_gap(engine.score(probes), scores(model, probes)), 1e-3, f"weights of version {version}")
    finally:
        engine.close()
        sender.close()


@pytest.mark.timeout(600)
def test_an_engine_reads_a_base_with_adapters_merged(tmp_path: Path) -> None:
    """Before any weights are sent to it, over two processes that share the model."""
    base = AutoModelForCausalLM.from_config(CONFIGS["mistral"], dtype=torch.float32)
    write(base, tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "model").mkdir()
    shutil.copyfile(tmp_path / "base" / "config.json", tmp_path / "model" / "config.json")
    link_merged(tmp_path / "model", tmp_path / "base", tmp_path / "adapter")
    engine = VllmEngine(
        RankContext("engine", 0, 1, {"dp": 1}, {"dp": 0}, "127.0.0.1", 0, 1, tmp_path / "log", "localhost"),
        model_folder=str(tmp_path / "model"),
        dtype="float32",
        engine=EngineSpec(kind="vllm", kv_cache_gib=0.02, max_batch_rows=16, max_context=160, tensor_parallel=2),
    )
    probes = list(probe_prompts(VOCAB, count=8, tokens=64))
    try:
        check_gap(probe_gap(engine.score(probes), scores(adapted.eval(), probes)), 1e-3, "the merged weights")
    finally:
        engine.close()
