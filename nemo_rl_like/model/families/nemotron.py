"""Nemotron-4 and Minitron: LayerNorm, the square of ReLU without a gate, half-turned heads."""

from __future__ import annotations

from nemo_rl_like.model.families.family import Family

FAMILY = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    rotary_share=0.5,
    norm="layer_1p",
    norm_eps=1e-5,
    norm_eps_key="norm_eps",
    activation="relu2",
    gated=False,
    written={"attention_bias": False, "mlp_bias": False},
)
