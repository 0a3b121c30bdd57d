"""GPT-OSS: attention sinks, a window in every second layer, biases everywhere, experts in one tensor with a clamped SwiGLU."""

from __future__ import annotations

from nemo_rl_like.model.families.family import ExpertNames, Family, Windows

FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    qkv_bias=True,
    biases=True,
    sinks=True,
    head_dim=64,
    windows=Windows(default=128, full_every=2, typed=True),
    stretched=True,
    rope_theta=150000.0,
    norm_eps=1e-5,
    experts=ExpertNames(
        count="num_local_experts",
        width="intermediate_size",
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        router="router",
        stacked=True,
    ),
    written={"attention_bias": True},
)
