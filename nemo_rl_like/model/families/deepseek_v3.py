"""DeepSeek-V3 and R1: latent attention, a shared expert, experts chosen by sigmoids and a bias that balances them."""

from __future__ import annotations

from nemo_rl_like.model.families.family import ExpertNames, Family

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    latent=True,
    interleave_key="rope_interleave",
    experts=ExpertNames(
        count="n_routed_experts",
        width="moe_intermediate_size",
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        normalize="norm_topk_prob",
        normalize_default=True,
        score="sigmoid",
        bias=True,
        scale="routed_scaling_factor",
        groups=True,
        shared="shared_experts",
        shared_count="n_shared_experts",
        first_dense="first_k_dense_replace",
    ),
    further_layers=True,
    written={"attention_bias": False, "num_nextn_predict_layers": 0},
)
