"""Megatron's layers on the CPU: its parameters and tensor-parallel sums, in few passes over memory.

Every function here has a backward of its own that saves inputs only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.attention import AttentionCall, call_of, rotate, rotated
from nemo_rl_like.model.bare_function import Function
from nemo_rl_like.model.families.family import Activation
from nemo_rl_like.model.hf_attention import PLAIN, Scores
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.latent_attention import LatentSelfAttention
from nemo_rl_like.model.local_activations import GeGlu, SquaredRelu, SwiGlu
from nemo_rl_like.model.local_linears import PLAIN as PLAIN_LINEARS
from nemo_rl_like.model.local_linears import Linears
from nemo_rl_like.model.local_norms import NORMS, RmsNorm
from nemo_rl_like.model.local_stacked import StackedExperts
from nemo_rl_like.model.mcore import (
    MLP,
    IdentityOp,
    MegatronModule,
    MLPSubmodules,
    ModuleSpec,
    ProcessGroupCollection,
    SelfAttention,
    TransformerConfig,
    TransformerLayer,
    checkpoint,
    get_gpt_layer_local_spec,
)
from nemo_rl_like.model.router import RowRouter


def local_layer_spec(config: ModelConfig, index: int, made_of: Linears = PLAIN_LINEARS) -> ModuleSpec:
    """One layer of the model on the CPU, counted from 0 over the whole model."""
    traits, experts = config.traits, config.experts.count if config.experts and config.has_experts(index) else None
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=config.qk_norm, normalization="RMSNorm")
    norm = NORMS[traits.norm]
    spec.module, layer = (NormedLayer if traits.post_norms else LocalLayer), spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    layer.self_attention.module, attention = LocalSelfAttention, layer.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = made_of.column, made_of.row
    attention.core_attention = IdentityOp  # the layout attends
    if traits.sinks:
        layer.self_attention.module = SinkSelfAttention
    if config.latent is not None:
        layer.self_attention = ModuleSpec(
            module=LatentSelfAttention, params={"latent": config.latent, "made_of": made_of}
        )
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if experts is not None:
        linears = MLPSubmodules(linear_fc1=made_of.column, linear_fc2=made_of.row)
        layer.mlp.submodules.experts = ModuleSpec(module=LocalExperts, submodules=linears)
        if config.experts is not None and config.experts.swiglu is not None:
            params = {"swiglu": config.experts.swiglu}
            layer.mlp.submodules.experts = ModuleSpec(module=StackedExperts, params=params)
        layer.mlp.submodules.router = RowRouter
        layer.mlp.submodules.shared_experts = ModuleSpec(module=LocalSharedExpert, submodules=linears)
        return spec
    layer.mlp.module = _MLPS[traits.activation]
    layer.mlp.submodules.linear_fc1, layer.mlp.submodules.linear_fc2 = made_of.column, made_of.row
    return spec


class LocalLayer(TransformerLayer):
    """x + attention(norm(x)), then y + mlp(norm(y)); no dropout, no biases after the products."""

    show_pass: Callable[[AttentionCall | None], None] | None = None
    """Told which pass the feed-forward layer is computed for, also where it is computed again, after other passes."""

    def forward(
        self, hidden_states: Tensor, packed_seq_params: AttentionCall | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        """[s, b, H] -> the same shape; the second value is Megatron's cross-attention context."""
        normed = self.input_layernorm(hidden_states)
        # No name for what attention gives: it would stay in memory to the end of the layer.
        middle = hidden_states + self.after_attention(
            self.self_attention(normed, packed_seq_params=packed_seq_params)[0]
        )
        normed = self.pre_mlp_layernorm(middle)
        if self.recompute_mlp and torch.is_grad_enabled():
            out = checkpoint(partial(self._again, packed_seq_params), False, normed)
        else:
            out = self.mlp(normed)[0]
        return middle + self.after_mlp(out), None

    def _again(self, call: AttentionCall | None, normed: Tensor) -> Tensor:
        if self.show_pass is not None:
            self.show_pass(call)
        out: Tensor = self.mlp(normed)[0]
        return out

    def after_attention(self, attended: Tensor) -> Tensor:
        """What is added of attention's output [s, b, H]."""
        return attended

    def after_mlp(self, out: Tensor) -> Tensor:
        """What is added of the feed-forward layer's output [s, b, H]."""
        return out


class NormedLayer(LocalLayer):
    """Norms behind attention and behind the feed-forward layer too."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attention_layernorm, self.post_mlp_layernorm = (
            RmsNorm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2)
        )

    def after_attention(self, attended: Tensor) -> Tensor:
        """See `LocalLayer`."""
        return self.post_attention_layernorm(attended)

    def after_mlp(self, out: Tensor) -> Tensor:
        """See `LocalLayer`."""
        return self.post_mlp_layernorm(out)


class LocalSelfAttention(SelfAttention):
    """Projects, rotates queries and keys, and lets the micro-batch's layout attend."""

    scores: Scores = PLAIN
    """Of this layer; the model sets it."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: AttentionCall | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """[s, b, H] -> [s, b, H]; the second value is the bias Megatron's attention may return."""
        call = call_of(packed_seq_params, attention_mask)
        query, key, value = self._heads(hidden_states, call)
        scores, again = self.scores_of(call), self.checkpoint_core_attention
        attended = call.attend_in(self.layer_number, scores, query, key, value, recompute=again)
        out: Tensor = self.linear_proj(attended)[0]
        return out, None

    def scores_of(self, call: AttentionCall) -> Scores:
        """What this layer makes of the scores of the heads that attend on this rank."""
        return self.scores

    def _heads(self, hidden_states: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [s, b, heads, d], rotated keys and plain values [s, b, kv_heads, d]."""
        rotary = call.rotary_for(self.scores)
        if self.config.qk_layernorm:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            return rotate(query, rotary), rotate(key, rotary), value
        mixed = self.linear_qkv(hidden_states)[0]
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed = mixed.unflatten(-1, (groups, -1, width))
        query, key, value = _SplitHeads.call(mixed, rotary.cos, rotary.sin)
        return query, key, value


class SinkSelfAttention(LocalSelfAttention):
    """The same with a score of each head that takes a share of the softmax."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.sinks = torch.nn.Parameter(torch.empty(self.num_attention_heads_per_partition, dtype=config.params_dtype))

    def scores_of(self, call: AttentionCall) -> Scores:
        """With context parallelism a rank attends with some of the heads."""
        context, sinks = call.context, self.sinks
        return replace(self.scores, sinks=sinks if context is None else sinks.chunk(context.size)[context.group.rank()])


class LocalMlp(MLP):
    """W2 (silu(W_gate x) * W_up x), or what `between` says."""

    between: type[Function] = SwiGlu
    """From the first product to the second's input."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        """[..., H] -> [..., H], each token's times `per_token_scale` [...] where given; the second value is the bias Megatron's MLP may
        return."""
        inner = self.between.call(self.linear_fc1(hidden_states)[0])
        if per_token_scale is not None:
            inner = (inner * per_token_scale[..., None]).to(inner.dtype)
        out: Tensor = self.linear_fc2(inner)[0]
        return out, None


class GeluMlp(LocalMlp):
    """W2 (gelu(W_gate x) * W_up x)."""

    between = GeGlu


class SquaredReluMlp(LocalMlp):
    """W2 max(W_up x, 0)^2."""

    between = SquaredRelu


_MLPS: Mapping[Activation, type[LocalMlp]] = {"silu": LocalMlp, "gelu_tanh": GeluMlp, "relu2": SquaredReluMlp}


def _of_width(config: TransformerConfig, width: int) -> TransformerConfig:
    """The same for feed-forward layers so wide: Megatron's second product reads the width there."""
    changed = copy(config)
    changed.ffn_hidden_size = width
    return changed


class LocalExperts(MegatronModule):
    """This rank's experts of one layer, one after the other."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        width = config.moe_ffn_hidden_size
        self.local_experts = torch.nn.ModuleList(
            LocalMlp(
                _of_width(config, width),
                submodules,
                is_expert=True,
                ffn_hidden_size=width,
                tp_group=pg_collection.expt_tp,
            )
            for _ in range(num_local_experts)
        )

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Tokens [n, H] sorted by expert, how many each has, and their weights [n] -> [n, H]; the second value is a bias."""
        counts = tokens_per_expert.tolist()
        parts = zip(self.local_experts, tokens.split(counts), weights.split(counts), strict=True)
        return torch.cat([expert(part, weight)[0] for expert, part, weight in parts]), None


class LocalSharedExpert(LocalMlp):
    """The expert that every token passes, times the sigmoid of its gate where it has one."""

    def __init__(
        self, config: TransformerConfig, submodules: MLPSubmodules, gate: bool, pg_collection: ProcessGroupCollection
    ) -> None:
        width = config.moe_shared_expert_intermediate_size
        super().__init__(_of_width(config, width), submodules, ffn_hidden_size=width, tp_group=pg_collection.tp)
        self.gate_weight: torch.nn.Parameter | None = None
        if gate:
            self.gate_weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
            # With sequence parallelism each rank has the gradient of its tokens only.
            setattr(self.gate_weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden_states: Tensor, *unused: object) -> Tensor:  # type: ignore[override]  # as Megatron's shared expert
        """[s, b, H] -> [s, b, H]."""
        out, _ = super().forward(hidden_states)
        if self.gate_weight is None:
            return out
        return out * functional.linear(hidden_states, self.gate_weight).sigmoid()


class _SplitHeads(Function):
    """[s, b, groups, n + 2, d]: each group's n queries, its key and its value -> heads apart, queries and keys rotated."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        turned = rotated(mixed[..., :-1, :], cos[..., None, :], sin[..., None, :])
        return turned[..., :-1, :].flatten(2, 3), turned[..., -1, :], mixed[..., -1, :].clone()

    @staticmethod
    def backward(ctx: Any, to_query: Tensor, to_key: Tensor, to_value: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = (x[..., None, :] for x in ctx.saved_tensors)
        groups, count = to_key.shape[2], to_query.shape[2] // to_key.shape[2]
        out = to_query.new_empty(*to_key.shape[:3], count + 2, to_key.shape[3])
        queries = to_query.unflatten(2, (groups, count))
        rotated(queries, cos, -sin, out=out[..., :count, :])
        rotated(to_key[..., None, :], cos, -sin, out=out[..., count : count + 1, :])
        out[..., count + 1, :] = to_value
        return out, None, None
