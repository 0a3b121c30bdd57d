"""Megatron's description of a model on a layout: `TransformerConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model import runtime
from nemo_rl_like.model.families.family import Activation
from nemo_rl_like.model.hf_config import ExpertsConfig, ModelConfig
from nemo_rl_like.model.mcore import TransformerConfig, squared_relu
from nemo_rl_like.spec.policy import Fp8Spec, LayoutSpec, RecomputeSpec


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": gelu_tanh,
    "relu2": squared_relu,
}


def transformer_config(
    config: ModelConfig,
    layout: LayoutSpec,
    dtype: torch.dtype,
    fp8: Fp8Spec | None = None,
    recompute: RecomputeSpec | None = None,
) -> TransformerConfig:
    """Megatron's description of the model on `layout`, without weights' initialisation.

    Raises InputError if the model cannot be split that way.
    """
    config.check_layout(layout)
    last = len(config.layers_of_stage(layout.stages - 1, layout.stages))
    uneven, traits = layout.pp > 1 and config.layers % layout.pp != 0, config.traits
    with runtime.quiet():
        return TransformerConfig(
            num_layers=config.layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.heads,
            num_query_groups=config.kv_heads,
            kv_channels=config.head_dim,
            ffn_hidden_size=config.ffn_width,
            normalization="LayerNorm" if traits.norm == "layer_1p" else "RMSNorm",
            layernorm_zero_centered_gamma=traits.norm != "rms",
            layernorm_epsilon=config.norm_eps,
            gated_linear_unit=traits.gated,
            activation_func=_ACTIVATIONS[traits.activation],
            add_bias_linear=False,
            add_qkv_bias=traits.qkv_bias,
            qk_layernorm=traits.qk_norm,
            init_method_std=config.init_std,
            perform_initialization=False,
            use_cpu_initialization=not runtime.on_cuda(),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attention_softmax_in_fp32=True,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype.itemsize == 2,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            num_layers_in_last_pipeline_stage=last if uneven else None,
            sequence_parallel=layout.sp,
            moe_token_dispatcher_type="alltoall",
            batch_p2p_comm=False,  # two ranks that are each other's next and previous one would mix up the messages of a batch
            **_expert_settings(config.experts, layout, runtime.on_cuda()),
            **_fp8_settings(fp8),
            **_recompute_settings(recompute, config.layers),
        )


def _recompute_settings(recompute: RecomputeSpec | None, layers: int) -> dict[str, Any]:
    if recompute is None:
        return {}
    if recompute.kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": min(recompute.layers or layers, layers),
    }


def _expert_settings(experts: ExpertsConfig | None, layout: LayoutSpec, grouped: bool) -> dict[str, Any]:
    """`grouped`: a rank's experts in one product, which needs Transformer Engine."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.width,
        "moe_router_topk": experts.per_token,
        # A softmax over all experts before the choice leaves weights that do not sum to 1; one over the chosen, weights that do.
        "moe_router_pre_softmax": not experts.normalize,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": grouped,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
    }


def _fp8_settings(fp8: Fp8Spec | None) -> dict[str, Any]:
    if fp8 is None:
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.parameters,
        "first_last_layers_bf16": fp8.first_bf16_layers + fp8.last_bf16_layers > 0,
        "num_layers_at_start_in_bf16": fp8.first_bf16_layers,
        "num_layers_at_end_in_bf16": fp8.last_bf16_layers,
        "fp8_amax_history_len": fp8.amax_history_len,
        "fp8_amax_compute_algo": fp8.amax_compute_algo,
        "fp8_margin": fp8.margin,
        # A kept FP8 copy of a weight would be stale in the engine, which decodes outside Megatron's schedules.
        "disable_parameter_transpose_cache": True,
    }
