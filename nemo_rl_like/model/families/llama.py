"""Llama 2 and 3.x, and what is built like it (SmolLM2)."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family

FAMILY = Family(
    model_type="llama", architecture="LlamaForCausalLM", written={"attention_bias": False, "mlp_bias": False}
)
