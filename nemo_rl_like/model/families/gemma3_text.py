"""Gemma 3, text only: Gemma 2's layers with norms of queries and keys in the place of caps, five windows to one full layer."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family, Windows

FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    qk_norm=True,
    windows=Windows(default=4096, full_every=6, typed=True),
    rope_kinds=("linear",),
    rope_theta=1e6,
    window_rope_theta=1e4,
    norm="rms_1p",
    post_norms=True,
    activation="gelu_tanh",
    activation_key="hidden_activation",
    scaled_embeddings=True,
    tie_embeddings=True,
    head_dim=256,
    score_scalar=256,
    logit_caps=True,
    written={"attention_bias": False, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
)
