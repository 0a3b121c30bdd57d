"""The embedded engine is at least as fast as transformers' `generate` on the same weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.model import runtime
from nemo_rl_like.spec.policy import LayoutSpec
from tests.ports import free_port

from .embedded_ranks import start_engine

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 52, 16


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@pytest.mark.slow
def test_decoding_smollm2_shapes_is_at_least_as_fast_as_transformers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    config = LlamaConfig(**shape, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    engine = start_engine(tmp_path, 0, 1, free_port(), LayoutSpec(), PROMPTS * SAMPLES)
    prompts = torch.randint(49152, (PROMPTS, PROMPT_TOKENS))
    requests = [Request(str(i), tuple(p.tolist()), tuple(range(SAMPLES))) for i, p in enumerate(prompts)]
    sampling = Sampling(max_new_tokens=NEW_TOKENS, ignore_stop=True)
    rows = prompts.repeat_interleave(SAMPLES, 0)

    def theirs() -> None:
        model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )

    try:
        pairs = [(seconds(lambda: engine.generate(requests, sampling)), seconds(theirs)) for _ in range(4)][1:]
        ours, others = (statistics.median(column) for column in zip(*pairs, strict=True))
        assert ours <= others, f"embedded {ours:.2f} s, transformers {others:.2f} s"
    finally:
        runtime.shutdown_distributed()
