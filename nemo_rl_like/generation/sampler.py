"""One counter-based draw per token: a sample depends on its seed, its position and its logits, never on the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl_like.tensors.words import signed_64

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_UNIFORM_BITS = 52
"""With 52 bits the largest u is 1 - 2**-52, so u * total stays below total in float64."""
_BLOCK = 128
"""Tokens of a block; a draw finds its block first, so that only sums of blocks and one block need float64."""


def draw(logits: Tensor, uniforms: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution of softmax(logits / temperature).

    `logits` [B, V] over the whole vocabulary; `uniforms` float64 [B] in [0, 1), None = the most likely token.
    Returns tokens int64 [B] and log-probs float32 [B], log-softmax(logits / temperature) at the token, in nats.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    probabilities = scaled.softmax(dim=-1)
    tokens = scaled.argmax(-1) if uniforms is None else _invert(probabilities, uniforms)
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [B]: the token t of each row with cumulative(t - 1) <= u * total < cumulative(t); `weights` float32 [B, V]."""
    vocab = weights.shape[1]
    whole = vocab - vocab % _BLOCK
    sums = weights[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK)).sum(dim=-1)
    if whole < vocab:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    block, uniforms = _locate(sums, uniforms)
    tokens = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, tokens.clamp(max=vocab - 1)) * (tokens < vocab)
    return block * _BLOCK + _locate(inside, uniforms)[0]


def _locate(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Place int64 [B] of u * total among the cumulative weights [B, n], and how far into that place it lies, float64 in [0, 1)."""
    cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, threshold, right=True)
    upper = cumulative.gather(1, place)
    lower = torch.where(place > 0, cumulative.gather(1, (place - 1).clamp(min=0)), 0.0)
    share = ((threshold - lower) / (upper - lower)).clamp(max=1 - 2.0**-_UNIFORM_BITS)
    return place[:, 0], share[:, 0]


def seeds_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """int64 [B]: any integers, reduced modulo 2**64."""
    return torch.tensor([signed_64(seed) for seed in seeds], dtype=torch.int64, device=device)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 [B] in [0, 1): two rounds of the SplitMix64 finaliser over (seed, position), each int64 [B].

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = _finalise(seeds + signed_64(_GOLDEN))
    state = _finalise(state + positions * signed_64(_GOLDEN))
    return _shift_right(state, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS


def _finalise(state: Tensor) -> Tensor:
    for shift, factor in _MIX:
        state = (state ^ _shift_right(state, shift)) * signed_64(factor)
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 shifts copy the sign bit, so it is cleared."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
