"""Parameters of one rank of a layout, counted without torch: the elements of DDP's buffers, and what lies beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from nemo_rl_like.model.hf_config import FFN_PROJECTIONS, QKV_PROJECTIONS, ModelConfig
from nemo_rl_like.model.hf_experts import ExpertsConfig
from nemo_rl_like.spec.policy import LayoutSpec

_PARAMETER_ALIGNMENT, _BUFFER_ALIGNMENT = 64, 128
"""Megatron starts each parameter in DDP's buffers at a multiple of elements, and ends a buffer at one of these and of the ranks that share it."""


def parameter_buffers(config: ModelConfig, layout: LayoutSpec, stage: int) -> tuple[int, int]:
    """Elements of a stage's two DDP buffers on one rank, with their padding: parameters that its tensor-parallel group shares out, and experts'."""
    layers = config.layers_of_stage(stage, layout.stages)
    dense, experts = _aligned(_ends(config, layout, stage)), 0
    for kind in {config.has_experts(layer) for layer in layers}:
        alike = [layer for layer in layers if config.has_experts(layer) == kind]
        dense += len(alike) * _aligned(_layer(config, layout, alike[0]))
        held, sizes = _experts(config, layout, alike[0])
        experts += len(alike) * held * _aligned(sizes)
    return _up(dense, math.lcm(layout.dp * layout.cp, _BUFFER_ALIGNMENT)), _up(
        experts, math.lcm(layout.expert_dp, _BUFFER_ALIGNMENT)
    )


def _aligned(sizes: Iterable[int]) -> int:
    """Elements of parameters of these sizes, one behind the other."""
    return sum(_up(size, _PARAMETER_ALIGNMENT) for size in sizes)


def parameters(config: ModelConfig, layout: LayoutSpec, stage: int) -> tuple[list[int], list[int]]:
    """Elements of each trained parameter of a stage on one rank: those that its tensor-parallel group shares out, and experts'."""
    dense, experts = list(_ends(config, layout, stage)), []
    for layer in config.layers_of_stage(stage, layout.stages):
        dense += _layer(config, layout, layer)
        held, sizes = _experts(config, layout, layer)
        experts += held * sizes
    return dense, experts


def untrained(config: ModelConfig, layout: LayoutSpec, stage: int) -> int:
    """Elements of float32 biases of a stage that move experts' choice and have no gradient."""
    names, experts = config.traits.experts, config.experts
    if names is None or experts is None or not names.bias:
        return 0
    return experts.count * sum(map(config.has_experts, config.layers_of_stage(stage, layout.stages)))


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _norm(config: ModelConfig) -> Iterable[int]:
    return (config.hidden_size,) * (2 if config.traits.norm == "layer_1p" else 1)


def _ends(config: ModelConfig, layout: LayoutSpec, stage: int) -> Iterator[int]:
    """What stands before or behind the layers."""
    vocabulary = config.padded_vocab(layout.tp) // layout.tp * config.hidden_size
    if stage == 0:
        yield vocabulary
    if stage == layout.stages - 1:
        yield from _norm(config)
        if config.score_head:
            yield config.hidden_size
        elif stage > 0 or not config.tie_embeddings:  # a tied head on a stage of its own is a second copy
            yield vocabulary


def _layer(config: ModelConfig, layout: LayoutSpec, layer: int) -> Iterator[int]:
    """All of a layer but its experts."""
    for _ in range(4 if config.traits.post_norms else 2):
        yield from _norm(config)
    yield from _attention(config, layout.tp) if config.latent is None else _latent_attention(config, layout.tp)
    if config.experts is not None and config.has_experts(layer):
        yield from _beside_experts(config, config.experts, layout.tp)
    else:
        yield from _feed_forward(config, config.intermediate_size, layout.tp)


def _attention(config: ModelConfig, tp: int) -> Iterator[int]:
    sizes = {name: outputs * inputs // tp for name, (outputs, inputs) in config.projections.items()}
    yield sum(sizes[name] for name in QKV_PROJECTIONS)
    yield sizes["o_proj"]
    if config.qkv_bias:
        yield (config.heads + 2 * config.kv_heads) * config.head_dim // tp
    if config.traits.biases:
        yield config.hidden_size
    if config.qk_norm:
        yield from (config.head_dim, config.head_dim)
    if config.traits.sinks:
        yield config.heads // tp


def _latent_attention(config: ModelConfig, tp: int) -> Iterator[int]:
    """Matrices into narrow vectors are whole on every rank."""
    for name, (outputs, inputs) in config.projections.items():
        if name not in FFN_PROJECTIONS:
            yield outputs * inputs // (1 if "_a_proj" in name else tp)
    if config.latent is not None:
        yield config.latent.key_value_rank
        if config.latent.query_rank is not None:
            yield config.latent.query_rank


def _feed_forward(config: ModelConfig, width: int, tp: int) -> Iterator[int]:
    """What goes into a feed-forward layer is one matrix."""
    *into, down = (outputs * inputs // tp for outputs, inputs in config.ffn_shapes(width).values())
    yield from (sum(into), down)


def _beside_experts(config: ModelConfig, experts: ExpertsConfig, tp: int) -> Iterator[int]:
    """The router, whole on every rank, and the expert that every token passes."""
    yield experts.count * config.hidden_size
    if config.traits.biases:
        yield experts.count
    if experts.shared_width:
        yield from _feed_forward(config, experts.shared_width, tp)
        if config.traits.experts is not None and config.traits.experts.shared_gate is not None:
            yield config.hidden_size


def _experts(config: ModelConfig, layout: LayoutSpec, layer: int) -> tuple[int, list[int]]:
    """How often a rank has tensors of these sizes: a tensor of each kind for each expert that it holds, or for all of them."""
    experts = config.experts
    if experts is None or not config.has_experts(layer):
        return 0, []
    held = experts.count // layout.ep
    if experts.swiglu is not None:
        gate_up, down = 2 * experts.width * config.hidden_size, experts.width * config.hidden_size
        return 1, [held * size for size in (gate_up, 2 * experts.width, down, config.hidden_size)]
    return held, list(_feed_forward(config, experts.width, layout.expert_tp))
