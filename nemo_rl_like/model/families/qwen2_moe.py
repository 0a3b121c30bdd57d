"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts in every layer, and one for all tokens behind a gate."""

from __future__ import annotations

from nemo_rl_like.model.families.family import ExpertNames, Family

FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    qkv_bias=True,
    qkv_bias_key="qkv_bias",
    window_counts=False,
    experts=ExpertNames(
        count="num_experts",
        width="moe_intermediate_size",
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        normalize="norm_topk_prob",
        shared="shared_expert",
        shared_width="shared_expert_intermediate_size",
        shared_gate="shared_expert_gate",
    ),
    written={
        "use_sliding_window": False,
        "sliding_window": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
