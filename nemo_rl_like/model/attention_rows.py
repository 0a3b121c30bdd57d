"""Attention of rows side by side: plain, within windows, with capped scores."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.hf_attention import PLAIN, Scores

_QUERIES = 512
"""Queries of a row that attend in one call where a mask or a cap is needed, so that no mask is as long as the row both ways."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
    """Each token of a row attends to itself and to what stands before it, within the window if there is one.

    [B, n, heads, d], [B, n, kv_heads, d] twice -> [B, n, heads, d].
    """
    length = query.shape[1]
    window = min(scores.window or length, length)
    if scores.cap is None and scores.sinks is None and window == length:
        return scaled_dot_product(query, key, value, causal=True, scores=scores)
    parts = []
    for start in range(0, length, _QUERIES):
        stop, first = min(start + _QUERIES, length), max(0, start - window + 1)
        mask = _band(start, stop, first, window, query)
        keys, values = key[:, first:stop], value[:, first:stop]
        parts.append(scaled_dot_product(query[:, start:stop], keys, values, causal=False, mask=mask, scores=scores))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask: Tensor | None = None, scores: Scores = PLAIN
) -> Tensor:
    """Softmax(cap(scale q k^T) + mask) v with grouped heads; the window is the caller's to put into the mask.

    [B, q, heads, d], [B, k, kv_heads, d] twice -> [B, q, heads, d]; `mask` is additive, broadcastable to [B, heads, q, k], and needed with
    a cap or sinks.
    """
    if scores.cap is not None:
        if mask is None:
            raise ValueError("capped scores need a mask")
        return _capped(query, key, value, mask, scores)
    if scores.sinks is not None:
        if mask is None:
            raise ValueError("sinks need a mask")
        return _with_sinks(query, key, value, mask, scores, scores.sinks)
    out = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scores.scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def cap_scores(x: Tensor, cap: float) -> Tensor:
    """float32 cap tanh(x / cap), a new tensor."""
    return (x.float() / cap).tanh_().mul_(cap)


def _band(start: int, stop: int, first: int, window: int, like: Tensor) -> Tensor:
    """[1, 1, stop - start, stop - first] 0 where query `start` + i attends to key `first` + j, else -inf."""
    query, key = torch.arange(start, stop, device=like.device), torch.arange(first, stop, device=like.device)
    distance = query[:, None] - key
    mask = torch.zeros(1, 1, *distance.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_((distance < 0) | (distance >= window), float("-inf"))


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, sinks: Tensor) -> Tensor:
    """One more key, before the others, has a value of zero and a channel that no other has; queries have their head's sink there."""
    scale = 1 / math.sqrt(query.shape[3]) if scores.scale is None else scores.scale
    own = (sinks / scale).to(query.dtype)[:, None].expand(*query.shape[:3], 1)
    one_more = (0, 1, 0, 0, 1, 0)
    keys, values = functional.pad(key, one_more), functional.pad(value, one_more)
    channel = keys.new_zeros(keys.shape[3])
    channel[-1] = 1.0
    keys = torch.cat([channel.expand(keys.shape[0], 1, keys.shape[2], -1), keys[:, 1:]], dim=1)
    plain = replace(scores, scale=scale, sinks=None)
    queries, whole = torch.cat([query, own], dim=3), functional.pad(mask, (1, 0))
    out = scaled_dot_product(queries, keys, values, causal=False, mask=whole, scores=plain)
    return out[..., :-1]


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    scale = 1 / math.sqrt(query.shape[3]) if scores.scale is None else scores.scale
    parts = [
        _CappedAttention.apply(queries, key, value, masks, scale, scores.cap)
        for queries, masks in zip(query.split(_QUERIES, dim=1), mask.split(_QUERIES, dim=2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class _CappedAttention(torch.autograd.Function):
    """Saves its inputs only. With t = tanh(s / cap), s = scale q k^T, p = softmax(cap t + mask) and g the gradient of p v: the gradient of s
    is p (g v^T - sum(p g v^T)) (1 - t^2)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale, ctx.cap = scale, cap
        groups = key.shape[2]
        _, weights = _tanh_and_weights(_by_group(query, groups), _by_group(key, groups), mask, scale, cap)
        return _by_token(weights.to(value.dtype) @ _by_group(value, groups), query.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, mask = ctx.saved_tensors
        groups, heads = key.shape[2], query.shape[2]
        q, k, v, g = (_by_group(x, groups) for x in (query, key, value, grad))
        tanh, weights = _tanh_and_weights(q, k, mask, ctx.scale, ctx.cap)
        to_value = weights.to(g.dtype).transpose(2, 3) @ g
        to_weights = (g @ v.transpose(2, 3)).float()
        inner = torch.linalg.vecdot(to_weights, weights)[..., None]
        to_scores = to_weights.sub_(inner).mul_(weights).mul_(tanh.square_().neg_().add_(1)).mul_(ctx.scale).to(q.dtype)
        to_query, to_key = to_scores @ k, to_scores.transpose(2, 3) @ q
        return _by_token(to_query, heads), _by_token(to_key, groups), _by_token(to_value, groups), None, None, None


def _tanh_and_weights(q: Tensor, k: Tensor, mask: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """float32 [B, groups, heads / groups * q, k] tanh(scale q k^T / cap), and the softmax."""
    tanh = (q @ k.transpose(2, 3)).float().mul_(scale / cap).tanh_()
    scores = (tanh * cap).unflatten(2, (-1, mask.shape[2])) + mask[:, :, None]
    return tanh, scores.softmax(dim=-1).flatten(2, 3)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, n, heads, d] -> [B, groups, heads / groups * n, d]"""
    return x.transpose(1, 2).unflatten(1, (groups, -1)).flatten(2, 3)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_by_group`."""
    return x.flatten(1, 2).unflatten(1, (heads, -1)).transpose(1, 2)
