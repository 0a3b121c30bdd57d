"""Builds this rank's Megatron model: Transformer Engine's layers on CUDA, Megatron's local layers on the CPU."""

from __future__ import annotations

import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.local_layers import local_layer_spec
from nemo_rl_like.model.local_linears import IN_NF4, PLAIN
from nemo_rl_like.model.local_norms import NORMS
from nemo_rl_like.model.mcore import (
    TransformerBlockSubmodules,
    parallel_state,
)
from nemo_rl_like.model.megatron_config import transformer_config
from nemo_rl_like.model.nf4 import Nf4Weight
from nemo_rl_like.model.nf4_map import check_nf4
from nemo_rl_like.model.pipeline_stage import LayerSpecs, fp8_alignment
from nemo_rl_like.model.scratch import ScratchReader
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import Fp8Spec, LayoutSpec, Nf4Spec, RecomputeSpec


def build_model(
    config: ModelConfig,
    layout: LayoutSpec,
    dtype: torch.dtype,
    *,
    seed: int | None = None,
    weights: TensorReader | None = None,
    fp8: Fp8Spec | None = None,
    adapters: bool = False,
    recompute: RecomputeSpec | None = None,
    base: Nf4Spec | None = None,
) -> MegatronModel:
    """This rank's stages and shard, with weights read from `weights` or made from `seed` (the same at every layout).

    Needs `runtime.init_distributed`. No weight is initialised and then thrown away.
    `fp8` computes the linear layers in FP8; `adapters`: the model will get some, which read what a norm gives, so no layer fuses the two; `recompute`
    says which activations the backward pass computes again; `base`: hold the layers' matrices, which nobody then trains, in 4 bits.
    Raises InputError if the layout does not fit the model, the weights do not cover it, or this machine lacks what `fp8` needs.
    """
    if (seed is None) == (weights is None):
        raise ValueError("give exactly one of `seed` (a model from scratch) and `weights`")
    if fp8 is not None:
        _require_fp8(config, layout, dtype, fp8)
    if base is not None:
        check_nf4(config, layout)
    if dtype is torch.float32:
        runtime.exact_float32()
    megatron = transformer_config(config, layout, dtype, fp8, recompute)
    with runtime.quiet():
        specs = [_spec(config, layout, virtual, adapters, base) for virtual in range(layout.vpp)]
        model = MegatronModel(config, megatron, specs).to(runtime.device())
    if base is not None:
        for weight in (parameter for parameter in model.parameters() if isinstance(parameter, Nf4Weight)):
            weight.double_scales = base.double
    weight_map = WeightMap(config)
    weight_map.mark_shards(model)
    weight_map.load_hf(model, weights if weights is not None else ScratchReader(config, seed or 0, dtype))
    return model


def _require_fp8(config: ModelConfig, layout: LayoutSpec, dtype: torch.dtype, fp8: Fp8Spec) -> None:
    able = runtime.fp8_capability(fp8.recipe)
    if not able.available:
        raise InputError(
            f"policy.fp8 (recipe {fp8.recipe}) {able.reason}; leave policy.fp8 out, or choose another recipe or GPU"
        )
    if dtype is not torch.bfloat16:
        raise InputError(
            f"policy.fp8 needs model.dtype bfloat16, which is {str(dtype).removeprefix('torch.')}; change one of them"
        )
    check_fp8_widths(config, layout, fp8)


def check_fp8_widths(config: ModelConfig, layout: LayoutSpec, fp8: Fp8Spec) -> None:
    """Raise InputError unless every linear layer has sizes that FP8 products of the recipe take."""
    widths = {
        "hidden_size": config.hidden_size,
        "heads * head_dim / tp": config.heads * config.head_dim // layout.tp,
        "(heads + 2 * kv_heads) * head_dim / tp": (config.heads + 2 * config.kv_heads) * config.head_dim // layout.tp,
    }
    if config.experts is None:
        widths["intermediate_size / tp"] = config.intermediate_size // layout.tp
    else:  # their tokens are filled up by Megatron's grouped layer
        widths["experts' width / etp"] = config.experts.width // layout.expert_tp
    step = fp8_alignment(fp8.recipe)
    for name, width in widths.items():
        if width % step:
            raise InputError(
                f"policy.fp8: the model's {name} is {width}, which is not a multiple of {step}; leave policy.fp8 out"
            )


def _spec(config: ModelConfig, layout: LayoutSpec, virtual: int, adapters: bool, base: Nf4Spec | None) -> LayerSpecs:
    """Of one of this rank's stages, counted by `virtual`."""
    stage = virtual * layout.pp + parallel_state.get_pipeline_model_parallel_rank()
    layers = config.layers_of_stage(stage, layout.stages)
    if runtime.on_cuda():
        return _transformer_engine_spec(config, layers, adapters, base)
    made_of = PLAIN if base is None else IN_NF4
    specs = [local_layer_spec(config, layer, made_of) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=NORMS[config.traits.norm])


def _transformer_engine_spec(
    config: ModelConfig, layers: range, adapters: bool, base: Nf4Spec | None
) -> TransformerBlockSubmodules:
    able = runtime.capabilities().transformer_engine
    if not able.available:
        raise InputError(
            f"training on CUDA {able.reason}; install it, or hide the GPU (CUDA_VISIBLE_DEVICES=) to use the CPU"
        )
    lacking = _not_on_transformer_engine(config)
    if lacking:
        raise InputError(
            f"the {config.family} model has {' and '.join(lacking)}, which this package's layers on Transformer Engine lack; "
            "hide the GPU (CUDA_VISIBLE_DEVICES=) to use the CPU"
        )
    if base is not None and config.experts is not None:
        raise InputError(
            f"policy.lora.base is {base.kind}, but on CUDA a rank's experts are computed in one product, of matrices in the model's type; leave it "
            "out, or hide the GPU (CUDA_VISIBLE_DEVICES=) to use the CPU"
        )
    from nemo_rl_like.model.te_attention import transformer_engine_layers

    count = config.experts.count if config.experts else None
    experts = [count if config.has_experts(layer) else None for layer in layers]
    made_of = None if base is None else IN_NF4
    return transformer_engine_layers(config.qk_norm, experts, fuse_norms=not adapters, made_of=made_of)


def _not_on_transformer_engine(config: ModelConfig) -> list[str]:
    """What the model needs that the layers of `te_attention` do not have."""
    lacking = {
        "a sliding window": config.attention.window is not None and config.attention.window < config.max_positions,
        "latent attention": config.latent is not None,
        "attention sinks": config.traits.sinks,
        "biases of every matrix": config.traits.biases,
        "capped attention scores": config.attention.score_cap is not None,
        "scores scaled by a number of their own": config.attention.score_scalar is not None,
        "norms behind attention and feed-forward layers": config.traits.post_norms,
    }
    return [name for name, needed in lacking.items() if needed]
