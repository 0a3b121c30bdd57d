"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from nemo_rl_like.model.families.family import ExpertNames, Family, Windows

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    norm_eps=1e-5,
    experts=ExpertNames(
        count="num_local_experts",
        width="intermediate_size",
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    ),
    windows=Windows(),
)
