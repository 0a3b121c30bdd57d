"""Mistral: Llama's layers, which attend within a sliding window in 7B v0.1."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family, Windows

FAMILY = Family(model_type="mistral", architecture="MistralForCausalLM", windows=Windows(default=4096))
