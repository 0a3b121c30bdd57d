"""The Transformer Engine layer spec, with core attention that understands this package's layouts (CUDA only)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.attention import AttentionCall, AttentionLayout, rotate
from nemo_rl_like.model.attention_layouts import CausalLayout, PackedLayout
from nemo_rl_like.model.local_linears import Linears
from nemo_rl_like.model.mcore import ModuleSpec, TransformerBlockSubmodules, TransformerConfig, parallel_state
from nemo_rl_like.model.router import RowRouter

with runtime.quiet():
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TENorm,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType


class TeLayoutAttention(TEDotProductAttention):
    """Padded and packed rows on Transformer Engine's kernels; other layouts, and float32, attend themselves."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        ranks = parallel_state.get_context_parallel_world_size()
        if ranks > 1:  # each of them attends with some of the heads
            config = copy.copy(config)
            config.num_attention_heads //= ranks
            config.num_query_groups //= ranks
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: AttentionCall | None = None,
    ) -> Tensor:
        """[s, b, heads, d] and twice [s, b, kv_heads, d], not yet rotated -> [s, b, heads * d]."""
        if packed_seq_params is None:
            raise ValueError("this attention takes its layout from an AttentionCall")
        call = packed_seq_params
        query, key = rotate(query, call.rotary), rotate(key, call.rotary)
        key, value = call.keys_and_values(self.layer_number, key, value)
        return call.attend(partial(self._attend, call.layout), query, key, value)

    def _attend(self, layout: AttentionLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.dtype is not torch.float32:  # the kernels take 16-bit types only
            if isinstance(layout, CausalLayout):
                out: Tensor = super().forward(query, key, value, None, attn_mask_type=AttnMaskType.causal)
                return out
            if isinstance(layout, PackedLayout):
                return self._packed(query, key, value, layout)
        return layout.attend(self.layer_number, query, key, value)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        cuts, longest = layout.cu_seqlens, layout.max_seqlen
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cuts, cu_seqlens_kv=cuts, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        rows = (x.squeeze(1).contiguous() for x in (query, key, value))
        out: Tensor = super().forward(*rows, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=params)
        return out.reshape(out.size(0), 1, -1)


def transformer_engine_layers(
    qk_norm: bool, experts: Sequence[int | None], *, fuse_norms: bool, made_of: Linears | None = None
) -> TransformerBlockSubmodules:
    """A stage's layers, `experts` of each; see `transformer_engine_spec`. `made_of`: the products of dense layers, where Transformer Engine's
    cannot be had."""
    specs = [transformer_engine_spec(qk_norm, count, fuse_norms=fuse_norms) for count in experts]
    if made_of is not None:
        for layer in (spec.submodules for spec in specs):
            attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
            attention.linear_qkv, attention.linear_proj = made_of.column, made_of.row
            mlp.linear_fc1, mlp.linear_fc2 = made_of.column, made_of.row
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)


def transformer_engine_spec(qk_norm: bool, experts: int | None = None, *, fuse_norms: bool = True) -> ModuleSpec:
    """One layer on Transformer Engine. `qk_norm`: queries and keys pass a norm of their own; `experts`: how many, None for a dense layer;
    `fuse_norms`: in one kernel with the linear layer behind, which then shows nobody its input."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=qk_norm
    )
    layer = spec.submodules
    layer.self_attention.submodules.core_attention = TeLayoutAttention
    if experts is not None:
        layer.mlp.submodules.router = RowRouter
    if not fuse_norms:
        layer.input_layernorm = TENorm
        layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if experts is None:
            layer.pre_mlp_layernorm = TENorm
            layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    return spec
