"""Gemma 2: norms around every part, capped scores and logits, a window in every second layer."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family, Windows

FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    windows=Windows(default=4096, full_every=2, typed=True),
    norm="rms_1p",
    post_norms=True,
    activation="gelu_tanh",
    activation_key="hidden_activation",
    scaled_embeddings=True,
    tie_embeddings=True,
    head_dim=256,
    score_scalar=256,
    score_cap=50.0,
    logit_caps=True,
    logit_cap=30.0,
    written={"attention_bias": False},
)
