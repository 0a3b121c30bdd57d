"""Qwen3-MoE: Qwen3's attention, and experts in every layer."""

from __future__ import annotations

from nemo_rl_like.model.families.family import ExpertNames, Family

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    window_counts=False,
    experts=ExpertNames(
        count="num_experts",
        width="moe_intermediate_size",
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        normalize="norm_topk_prob",
    ),
    written={
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
