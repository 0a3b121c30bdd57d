"""Dropout whose mask is a function of what it falls on, so that it does not depend on how rows share passes and ranks.

Each element's draw hashes (seed, update, token of the batch, layer, projection, channel), on the device that computes it. No generator has a
state, so a layer that is computed again in the backward pass, and an update that is made again after a resume, find the same mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_like.tensors.words import signed_64
from nemo_rl_like.tokens.batch import TokenBatch

_ROUNDS_64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and factors of the finalizer of SplitMix64 (Steele, Lea and Flood 2014); its last shift is 31."""
_ROUNDS_32 = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Those of Wellons' lowbias32, whose bits flip most evenly among functions of this form; its last shift is 16."""
_CHANNEL_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenKeys:
    """Words that tell the tokens of a pass apart, as this rank's layers have them."""

    sequence: Tensor
    """int32 [s, b] of this rank's part of the sequences, whole over tensor-parallel ranks."""
    part: Tensor
    """int32 [s / tp, b] of what this rank keeps between its linear layers with sequence parallelism; else `sequence`."""


def token_keys(batch: TokenBatch, seed: int, update: int, walk: int) -> Tensor:
    """int32 [N] a word for each token of the batch, the same for the tokens of a prompt that rows share (`prompt_id`).

    `update` counts optimizer steps, `walk` the walks of one.
    """
    digest = hashlib.sha256(f"{seed}/{update}/{walk}".encode()).digest()
    offset = signed_64(int.from_bytes(digest[:8], "big"))
    return _low_32(_mixed_64(_first_places(batch) + offset))


def _first_places(batch: TokenBatch) -> Tensor:
    """int64 [N] each token's place in the batch; of a shared prompt's token, that in the first row that has it."""
    _, number = torch.unique(batch.prompt_id, return_inverse=True)
    first = torch.full((batch.rows,), batch.rows).scatter_reduce_(0, number, torch.arange(batch.rows), "amin")[number]
    row, starts = batch.row_of_token, batch.cu_seqlens[:-1]
    inside = torch.arange(batch.tokens.numel()) - starts[row]
    owner = torch.where(inside < batch.prompt_lens[row], first[row], row)
    return starts[owner] + inside


def channel_keys(layer: int, projection: int, first: int, count: int, device: torch.device) -> Tensor:
    """int32 [count] a word for each input channel of a projection, from channel `first` on."""
    site = (layer << 8 | projection) << _CHANNEL_BITS
    return _low_32(_mixed_64(torch.arange(first, first + count, device=device) + site))


def kept(tokens: Tensor, channels: Tensor, share: float) -> Tensor:
    """bool [..., C] whether a token's element in a channel is kept, for words int32 [...] and [C]; false in `share` of them."""
    words = tokens[..., None] ^ channels
    for shift, factor in _ROUNDS_32:
        words ^= _shifted(words, shift)
        words *= factor
    words ^= _shifted(words, 16)
    return words >= round(share * (1 << 32)) - (1 << 31)


def dropped_product(x: Tensor, weight: Tensor, tokens: Tensor, channels: Tensor, share: float) -> Tensor:
    """drop(x) W^T for x [..., in] and W [out, in], where drop sets elements to 0 and divides the others by 1 - `share`."""
    out: Tensor = _DroppedProduct.apply(x, weight, tokens, channels, share)
    return out


@dataclass(frozen=True, slots=True)
class SiteDropout:
    """Dropout of the inputs of some projections of one layer."""

    share: float
    """Of elements that are 0."""
    channels: Mapping[str, Tensor]
    """int32 [in] words of this rank's input channels, by projection."""

    def product(self, name: str, x: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        """drop(x) W^T for `tokens` int32 [...]."""
        return dropped_product(x, weight, tokens, self.channels[name], self.share)


class _DroppedProduct(torch.autograd.Function):
    """Keeps x alone, which other products of it keep too, and finds the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tokens: Tensor, channels: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(x, weight, tokens, channels)
        ctx.share = share
        return _dropped(x, tokens, channels, share) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        x, weight, tokens, channels = ctx.saved_tensors
        to_x = _dropped(grad @ weight, tokens, channels, ctx.share) if ctx.needs_input_grad[0] else None
        to_weight = grad.flatten(0, -2).t() @ _dropped(x, tokens, channels, ctx.share).flatten(0, -2)
        return to_x, to_weight, None, None, None


def _dropped(x: Tensor, tokens: Tensor, channels: Tensor, share: float) -> Tensor:
    return torch.where(kept(tokens, channels, share), x / (1 - share), x.new_zeros(()))


def _mixed_64(words: Tensor) -> Tensor:
    for shift, factor in _ROUNDS_64:
        words = (words ^ _shifted(words, shift)) * signed_64(factor)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, by: int) -> Tensor:
    """Bits moved to the right with zeros behind them."""
    return (words >> by).bitwise_and_((1 << (8 * words.itemsize - by)) - 1)


def _low_32(words: Tensor) -> Tensor:
    return ((words & 0xFFFFFFFF) - (words >> 31 & 1) * (1 << 32)).to(torch.int32)
