"""Qwen3 (dense): norms of queries and keys, no biases."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    window_counts=False,
    written={"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
)
