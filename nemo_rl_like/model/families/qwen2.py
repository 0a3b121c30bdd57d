"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    window_counts=False,
    written={"use_sliding_window": False, "sliding_window": None},
)
