"""Qwen3 (dense): norms of queries and keys, no biases."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family, Windows

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    windows=Windows(default=4096, switch=True, typed=True),
    written={"attention_bias": False},
)
