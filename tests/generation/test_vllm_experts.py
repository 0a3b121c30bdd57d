"""vLLM takes over the weights of models with experts, and gives their log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.probe import check_gap, probe_gap, probe_prompts
from nemo_rl_like.generation.vllm import VllmEngine
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
    "num_experts_per_tok": 2,
}


def make(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=None))
    else:
        own = {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **own))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(0.0, 0.1)
    return model.eval()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_engine_has_the_log_probs_of_experts_before_and_after_updates(family: str, tmp_path: Path) -> None:
    first = make(family, 0)
    first.save_pretrained(tmp_path / "model")
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
