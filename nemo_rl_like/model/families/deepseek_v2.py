"""DeepSeek-V2 and V2-Lite: latent attention, shared experts, experts chosen by a softmax in the token's best groups."""

from __future__ import annotations

from nemo_rl_like.model.families.family import ExpertNames, Family

FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    latent=True,
    experts=ExpertNames(
        count="n_routed_experts",
        width="moe_intermediate_size",
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        normalize="norm_topk_prob",
        may_normalize=False,
        scale="routed_scaling_factor",
        groups=True,
        group_best=1,
        method="topk_method",
        shared="shared_experts",
        shared_count="n_shared_experts",
        first_dense="first_k_dense_replace",
    ),
    written={"attention_bias": False, "mlp_bias": False},
)
