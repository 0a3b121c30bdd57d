"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family, Windows

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    windows=Windows(default=4096, switch=True, typed=True),
)
