"""Mistral from 7B v0.3 on: Llama's layers. Earlier ones attend within a sliding window, which is not supported."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family

FAMILY = Family(
    model_type="mistral", architecture="MistralForCausalLM", default_window=4096, written={"sliding_window": None}
)
