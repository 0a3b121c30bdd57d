"""Megatron's layers on the CPU: its parameters and tensor-parallel sums, in few passes over memory.

Every function here has a backward of its own that saves inputs only. A weight's gradient goes straight into the buffer that
DDP keeps for it, so that it is written once and not added a second time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.attention import AttentionCall, rotate, rotated
from nemo_rl_like.model.gradients import add_product, gradient_buffer
from nemo_rl_like.model.mcore import (
    MLP,
    ColumnParallelLinear,
    IdentityOp,
    MegatronModule,
    MLPSubmodules,
    ModuleSpec,
    ProcessGroupCollection,
    RowParallelLinear,
    SelfAttention,
    TransformerConfig,
    TransformerLayer,
    checkpoint,
    get_gpt_layer_local_spec,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from nemo_rl_like.model.router import RowRouter


def local_layer_spec(qk_norm: bool, experts: int | None = None) -> ModuleSpec:
    """One layer on the CPU. `qk_norm`: queries and keys pass a norm of their own; `experts`: how many, None for a dense layer."""
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=qk_norm, normalization="RMSNorm")
    spec.module, layer = LocalLayer, spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    layer.self_attention.module, attention = LocalSelfAttention, layer.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = LocalColumnLinear, LocalRowLinear
    attention.core_attention = IdentityOp  # the layout attends
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if experts is not None:
        linears = MLPSubmodules(linear_fc1=LocalColumnLinear, linear_fc2=LocalRowLinear)
        layer.mlp.submodules.experts = ModuleSpec(module=LocalExperts, submodules=linears)
        layer.mlp.submodules.router = RowRouter
        return spec
    layer.mlp.module = LocalMlp
    layer.mlp.submodules.linear_fc1, layer.mlp.submodules.linear_fc2 = LocalColumnLinear, LocalRowLinear
    return spec


class LocalLayer(TransformerLayer):
    """x + attention(norm(x)), then y + mlp(norm(y)); no dropout, no biases after the products."""

    def forward(
        self, hidden_states: Tensor, packed_seq_params: AttentionCall | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        """[s, b, H] -> the same shape; the second value is Megatron's cross-attention context."""
        attended, _ = self.self_attention(self.input_layernorm(hidden_states), packed_seq_params=packed_seq_params)
        middle = hidden_states + attended
        normed = self.pre_mlp_layernorm(middle)
        if self.recompute_mlp and torch.is_grad_enabled():
            out = checkpoint(lambda x: self.mlp(x)[0], False, normed)
        else:
            out = self.mlp(normed)[0]
        return middle + out, None


class LocalSelfAttention(SelfAttention):
    """Projects, rotates queries and keys, and lets the micro-batch's layout attend."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: AttentionCall | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """[s, b, H] -> [s, b, H]; the second value is the bias Megatron's attention may return."""
        if packed_seq_params is None or attention_mask is not None:
            raise ValueError("this attention takes its layout from an AttentionCall; masks are not accepted")
        call = packed_seq_params
        query, key, value = self._heads(hidden_states, call)
        attend = partial(call.attend, partial(call.layout.attend, self.layer_number))
        if self.checkpoint_core_attention and torch.is_grad_enabled():
            attended = checkpoint(attend, False, query, key, value)
        else:
            attended = attend(query, key, value)
        out: Tensor = self.linear_proj(attended)[0]
        return out, None

    def _heads(self, hidden_states: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [s, b, heads, d], rotated keys and plain values [s, b, kv_heads, d]."""
        if self.config.qk_layernorm:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            return rotate(query, call.rotary), rotate(key, call.rotary), value
        mixed = self.linear_qkv(hidden_states)[0]
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed = mixed.unflatten(-1, (groups, -1, width))
        query, key, value = _SplitHeads.call(mixed, call.rotary.cos, call.rotary.sin)
        return query, key, value


class LocalMlp(MLP):
    """SwiGLU: W2 (silu(W_gate x) * W_up x)."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        """[..., H] -> [..., H], each token's times `per_token_scale` [...] where given; the second value is the bias Megatron's MLP may
        return."""
        inner = _SwiGlu.call(self.linear_fc1(hidden_states)[0])
        if per_token_scale is not None:
            inner = (inner * per_token_scale[..., None]).to(inner.dtype)
        out: Tensor = self.linear_fc2(inner)[0]
        return out, None


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
        self.local_experts = torch.nn.ModuleList(
            LocalMlp(
                config,
                submodules,
                is_expert=True,
                ffn_hidden_size=config.moe_ffn_hidden_size,
                tp_group=pg_collection.expt_tp,
            )
            for _ in range(num_local_experts)
        )

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Tokens [n, H] sorted by expert, how many each has, and their weights [n] -> [n, H]; the second value is a bias."""
        counts = tokens_per_expert.tolist()
        parts = zip(self.local_experts, tokens.split(counts), weights.split(counts), strict=True)
        return torch.cat([expert(part, weight)[0] for expert, part, weight in parts]), None


class LocalColumnLinear(ColumnParallelLinear):
    """x W^T with this rank's rows of W; the gradient of x is summed over the tensor-parallel ranks. With sequence parallelism x is a part of
    the sequence, gathered here. An expert's x has been gathered before."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, in] (or [s / tp, b, in]) -> [s, b, out / tp]; the second value is the bias Megatron's linear may leave to its caller."""
        if self.is_expert:
            out = _Linear.call(input_, self.weight, None)
        elif self.sequence_parallel:
            out = _GatheredLinear.call(input_, self.weight, self.tp_group)
        else:
            out = _Linear.call(input_, self.weight, self.tp_group if self.tp_group.size() > 1 else None)
        return (out if self.bias is None else out + self.bias), None


class LocalRowLinear(RowParallelLinear):
    """x W^T with this rank's columns of W and its part of x, summed over the tensor-parallel ranks; with sequence parallelism each of them
    keeps a part of the sequence. An expert's are summed afterwards."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[s, b, in / tp] -> [s, b, out] (or [s / tp, b, out]); the second value is the bias Megatron's linear may leave to its caller."""
        out = _Linear.call(input_, self.weight, None)
        if self.is_expert:
            return out, None
        if self.sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif self.tp_group.size() > 1:
            out = reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out, None


class RmsNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019), in float32; the signature that Megatron's specs build."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters so marked over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        out: Tensor = _RmsNorm.call(x, self.weight, self.eps)
        return out


class _NoContext:
    """Stands for autograd's context where there is nothing to save."""

    group: dist.ProcessGroup | None

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Forget the tensors."""


class _Function(torch.autograd.Function):
    """A function that costs its forward alone where gradients are off; `apply` adds 10 us, eight times a layer and decoded token."""

    @classmethod
    def call(cls, *inputs: object) -> Any:
        """`apply`, or the bare forward."""
        return cls.apply(*inputs) if torch.is_grad_enabled() else cls.forward(_NoContext(), *inputs)


class _Linear(_Function):
    """x W^T. `group`: ranks over which the gradient of x is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)  # a frozen weight's gradient is never made
        ctx.group = group
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        to_x = grad @ weight
        summing = None if ctx.group is None else dist.all_reduce(to_x, group=ctx.group, async_op=True)
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = add_product(gradient_buffer(weight), grad.flatten(0, -2), x.flatten(0, -2))
        if summing is not None:
            summing.wait()
        return to_x, to_weight, None


class _GatheredLinear(_Function):
    """x W^T of x gathered along the first axis; its gradient is summed and cut again. x is kept in part and gathered once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group = group
        return _gathered(x, group) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        whole = grad @ weight
        to_x = whole.new_empty(whole.shape[0] // ctx.group.size(), *whole.shape[1:])
        summing = dist.reduce_scatter_tensor(to_x, whole.contiguous(), group=ctx.group, async_op=True)
        to_weight = None
        if ctx.needs_input_grad[1]:
            rows = _gathered(x, ctx.group).flatten(0, -2)
            to_weight = add_product(gradient_buffer(weight), grad.flatten(0, -2), rows)
        summing.wait()
        return to_x, to_weight, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


class _SwiGlu(_Function):
    """[gate, up] along the last axis -> silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        out = torch.empty_like(both)
        to_gate, to_up = out.chunk(2, dim=-1)
        torch.mul(grad, up, out=to_gate)
        torch.ops.aten.silu_backward.grad_input(to_gate, gate, grad_input=to_gate)
        torch.ops.aten.silu.out(gate, out=to_up)
        to_up.mul_(grad)
        return out


class _RmsNorm(_Function):
    """With r = 1 / sqrt(mean(x^2) + eps): y = x r w, dx = r (g w - x r^2 mean(g w x)), dw = sum over rows of g x r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        wide, upper, factor = x.float().reshape(-1, width), grad.float().reshape(-1, width), weight.float()
        rows = scale.reshape(-1, 1)
        product = upper * wide
        to_weight = torch.mv(product.t(), rows[:, 0])
        along = torch.mv(product, factor)[:, None].mul_(rows.pow(3)).div_(width)
        to_x = torch.mul(upper, factor, out=product).mul_(rows).addcmul_(wide, along, value=-1)
        return to_x.view(x.shape).to(x.dtype), to_weight.to(weight.dtype), None


class _SplitHeads(_Function):
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
