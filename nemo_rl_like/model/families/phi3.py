"""Phi-3 and Phi-4: Llama's layers with packed projections in files; positions may turn a part of each head only."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family, Windows

FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    packed=True,
    rotary_share=1.0,
    rope_kinds=("longrope",),
    norm_eps=1e-5,
    windows=Windows(),
    written={"attention_bias": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
)
