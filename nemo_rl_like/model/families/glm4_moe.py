"""GLM-4.5 and 4.6: half-turned heads, a shared expert, experts chosen by sigmoids and a bias that balances them."""

from __future__ import annotations

from nemo_rl_like.model.families.family import ExpertNames, Family

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    qkv_bias_key="attention_bias",
    qk_norm_key="use_qk_norm",
    rotary_share=0.5,
    norm_eps=1e-5,
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
    written={"num_nextn_predict_layers": 0},
)
