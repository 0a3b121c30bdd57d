"""Attention that a micro-batch lays out: rotary positions by token, and one `AttentionLayout` for all layers.

Megatron hands `packed_seq_params` unchanged to the attention of every layer. This package passes an `AttentionCall` there:
how rows attend (the layout) and the cosines of this micro-batch's positions. Both are made once per micro-batch, not per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.context import ContextRanks
from nemo_rl_like.model.dropout import TokenKeys
from nemo_rl_like.model.hf_attention import PLAIN, Scores
from nemo_rl_like.model.mcore import checkpoint
from nemo_rl_like.model.row_places import RowPairs


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines of a micro-batch's positions."""

    cos: Tensor
    """[s, b, 1, turned / 2], for heads of which positions turn the first `turned` channels"""
    sin: Tensor
    """[s, b, 1, turned / 2]"""


class AttentionLayout(Protocol):
    """Which tokens attend to which. Tensors are this rank's heads, with rotary positions applied."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """[s, b, heads, d], [s, b, kv_heads, d] twice -> [s, b, heads * d]. `layer` tells the layers of a model apart."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype) -> AttentionLayout:
        """The same layout with its index tensors on `device` and its additive masks in `dtype`."""
        ...


def rotary_of(position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype, amplitude: float = 1.0) -> Rotary:
    """`amplitude` times cosines and sines for `position_ids` [b, s], computed in float32 and returned in `dtype`."""
    angle = (position_ids.t()[..., None].float() * frequencies)[:, :, None, :]
    cos, sin = angle.cos(), angle.sin()
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    return Rotary(cos.to(dtype), sin.to(dtype))


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate `x` [s, b, heads, d] by its positions, halves convention: (x1 cos - x2 sin, x2 cos + x1 sin), rest."""
    return _Rotate.apply(x, rotary.cos, rotary.sin)


class _Rotate(torch.autograd.Function):
    """A rotation in few passes; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[misc]  # torch types it as one tensor
        return rotated(grad, cos, -sin), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """`rotate` without autograd, for cosines and sines that broadcast with [..., turned / 2]; `out` must not overlap `x`."""
    half = cos.shape[-1]
    turned = 2 * half
    first, second = x[..., :half], x[..., half:turned]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:turned]).addcmul_(first, sin)
    if turned < x.shape[-1]:
        out[..., turned:] = x[..., turned:]
    return out


def without_padding(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], padding: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """`attend` on the places before the last `padding` ones of [s, b, heads, d]; zeros at those: [s, b, heads * d]."""
    if not padding:
        return attend(query, key, value)
    out = attend(query[:-padding], key[:-padding], value[:-padding])
    return functional.pad(out, (0, 0, 0, 0, 0, padding))


class PrefixedKeys(Protocol):
    """What stands in the place of some tokens' keys and values; see `prefix.PrefixCall`."""

    def replaced(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, kv_heads, d] each, keys rotated, of a layer by its number."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one forward pass hands to every layer's core attention, in the place of Megatron's `PackedSeqParams`."""

    layout: AttentionLayout
    rotary: Rotary
    window_rotary: Rotary | None = None
    """Of layers that attend within a window, where they turn positions in a way of their own (Gemma 3)."""
    padding: int = 0
    """Places at the end that belong to no token; the layout does not know them."""
    rows: RowPairs | None = None
    """Which of this rank's tokens are a row's, where routers balance rows."""
    context: ContextRanks | None = None
    """The ranks that each have a part of the sequences; None: this one has them whole."""
    token_keys: TokenKeys | None = None
    """Of this rank's tokens, where adapters have dropout."""
    prefixed: PrefixedKeys | None = None
    """Learned keys and values, where there are any."""
    qkv_format: str = "sbhd"
    """Read by Megatron: keep [s, b, heads, d], do not flatten."""

    def rotary_for(self, scores: Scores) -> Rotary:
        """Of a layer with these scores."""
        return self.rotary if self.window_rotary is None or scores.window is None else self.window_rotary

    def keys_and_values(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer attends to, of what it computed: [s, b, kv_heads, d] each, keys rotated."""
        return (key, value) if self.prefixed is None else self.prefixed.replaced(layer, key, value)

    def attend_in(
        self, layer: int, scores: Scores, query: Tensor, key: Tensor, value: Tensor, *, recompute: bool
    ) -> Tensor:
        """A layer's attention between its projections, with its prefixes: [s, b, heads, d], [s, b, kv_heads, d] twice -> [s, b, heads * d].

        `recompute`: what it would keep for the backward pass is computed again there.
        """
        key, value = self.keys_and_values(layer, key, value)
        attend = partial(self.attend, partial(self.layout.attend, layer, scores=scores))
        if recompute and torch.is_grad_enabled():
            attended: Tensor = checkpoint(attend, False, query, key, value)
            return attended
        return attend(query, key, value)

    def attend(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """The layout's `attend` on what this rank has: [s, b, heads, d], [s, b, kv_heads, d] twice -> [s, b, heads * d]."""
        whole = partial(without_padding, attend, self.padding)
        if self.context is None:
            return whole(query, key, value)
        return self.context.by_heads(whole, query, key, value)


def call_of(packed_seq_params: AttentionCall | None, attention_mask: Tensor | None) -> AttentionCall:
    """What Megatron hands to a layer's attention. Raises ValueError without a layout, and for a mask."""
    if packed_seq_params is None or attention_mask is not None:
        raise ValueError("this attention takes its layout from an AttentionCall; masks are not accepted")
    return packed_seq_params
