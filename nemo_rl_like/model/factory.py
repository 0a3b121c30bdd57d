"""Builds this rank's Megatron model: Transformer Engine's layers on CUDA, Megatron's local layers on the CPU."""

from __future__ import annotations

import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.attention import LayoutAttention, RmsNorm
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import ModelConfig, transformer_config
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.mcore import (
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    parallel_state,
)
from nemo_rl_like.model.scratch import ScratchReader
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.experiment import LayoutSpec


def build_model(
    config: ModelConfig,
    layout: LayoutSpec,
    dtype: torch.dtype,
    *,
    seed: int | None = None,
    weights: TensorReader | None = None,
) -> MegatronModel:
    """This rank's stage and shard, with weights read from `weights` or made from `seed` (the same at every layout).

    Needs `runtime.init_distributed`. No weight is initialised and then thrown away.
    Raises InputError if the layout does not fit the model, or the weights do not cover it.
    """
    if (seed is None) == (weights is None):
        raise ValueError("give exactly one of `seed` (a model from scratch) and `weights`")
    megatron = transformer_config(config, layout, dtype)
    with runtime.quiet():
        model = MegatronModel(
            config,
            megatron,
            _spec(config, megatron),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        ).to(runtime.device())
    weight_map = WeightMap(config)
    weight_map.mark_shards(model)
    weight_map.load_hf(model, weights if weights is not None else ScratchReader(config, seed or 0, dtype))
    return model


def _spec(config: ModelConfig, megatron: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    if runtime.on_cuda():
        return _transformer_engine_spec(config)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.core_attention = LayoutAttention
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    count = get_num_layers_to_build(megatron)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=RmsNorm)


def _transformer_engine_spec(config: ModelConfig) -> ModuleSpec:
    able = runtime.capabilities().transformer_engine
    if not able.available:
        raise InputError(
            f"training on CUDA {able.reason}; install it, or hide the GPU (CUDA_VISIBLE_DEVICES=) to use the CPU"
        )
    from nemo_rl_like.model.te_attention import transformer_engine_spec

    return transformer_engine_spec(config.qk_norm)
