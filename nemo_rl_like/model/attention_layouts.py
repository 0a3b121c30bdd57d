"""The attention layouts of a forward pass: padded rows, rows end to end, and a prompt shared by its responses.

None of them builds a [tokens, tokens] mask: attention runs per block of rows of similar length, and every index and mask is made
once per micro-batch and used by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemo_rl_like.model.attention_rows import causal_attention, scaled_dot_product
from nemo_rl_like.model.hf_attention import PLAIN, Scores

_MAX_WASTE = 1.25
"""Rows share a block while padding them to the longest costs at most this factor."""


@dataclass(frozen=True, slots=True)
class CausalLayout:
    """[b, s] rows padded on the right; a token attends to itself and to what stands before it in its row."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `AttentionLayout`."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return causal_attention(q, k, v, scores).transpose(0, 1).flatten(2)

    def to(self, device: torch.device, dtype: torch.dtype) -> CausalLayout:
        """See `AttentionLayout`."""
        return self


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows that lie end to end in tokens `start`..`stop`, and how to pad them to [rows, width]."""

    start: int
    stop: int
    rows: int
    width: int
    """Longest row, in tokens."""
    pad: Tensor | None
    """int64 [rows * width] token (from `start`) at each padded place, any token where there is none; None: no padding."""
    unpad: Tensor | None
    """int64 [stop - start] padded place of each token; None: no padding."""

    @classmethod
    def of(cls, start: int, lengths: Sequence[int]) -> RowBlock:
        """The block of rows with these lengths, the first at token `start`."""
        rows, width, tokens = len(lengths), max(lengths, default=0), sum(lengths)
        if rows * width == tokens:
            return cls(start, start + tokens, rows, width, None, None)
        count = torch.tensor(lengths)
        first = torch.cumsum(count, 0) - count
        column = torch.arange(width)
        pad = (first[:, None] + torch.minimum(column, count[:, None] - 1)).flatten()
        unpad = torch.arange(rows * width)[(column < count[:, None]).flatten()]
        return cls(start, start + tokens, rows, width, pad, unpad)

    def to_rows(self, tokens: Tensor) -> Tensor:
        """[stop - start, heads, d] of this block -> [rows, width, heads, d]; padded places hold some token's value."""
        if self.pad is not None and self.unpad is not None:
            tokens = _Pad.apply(tokens, self.pad, self.unpad)
        return tokens.unflatten(0, (self.rows, self.width))

    def to_tokens(self, rows: Tensor) -> Tensor:
        """[rows, width, heads, d] -> [stop - start, heads * d]."""
        flat = rows.flatten(2).flatten(0, 1)
        if self.pad is not None and self.unpad is not None:
            return _Unpad.apply(flat, self.unpad)
        return flat

    def to(self, device: torch.device) -> RowBlock:
        """The same block with its index tensors on `device`."""
        if self.pad is None or self.unpad is None:
            return self
        return replace(self, pad=self.pad.to(device), unpad=self.unpad.to(device))


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """b = 1: rows end to end, sorted so that blocks hold rows of similar length; each row attends causally to itself."""

    blocks: tuple[RowBlock, ...]
    cu_seqlens: Tensor
    """int32 [rows + 1] cuts between rows (for kernels that take variable lengths)."""
    max_seqlen: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedLayout:
        """The layout of rows with these lengths, laid end to end in this order."""
        cuts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cuts[1:] = torch.cumsum(torch.tensor(lengths), 0)
        blocks, start = [], 0
        for part in similar_lengths(lengths):
            blocks.append(RowBlock.of(start, [lengths[i] for i in part]))
            start = blocks[-1].stop
        return cls(tuple(blocks), cuts, max(lengths))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `AttentionLayout`."""
        parts = zip(self.blocks, *(_cut(x, self.blocks) for x in (query, key, value)), strict=True)
        return _joined([_causal(block, q, k, v, scores) for block, q, k, v in parts])

    def to(self, device: torch.device, dtype: torch.dtype) -> PackedLayout:
        """See `AttentionLayout`."""
        blocks = tuple(b.to(device) for b in self.blocks)
        return replace(self, blocks=blocks, cu_seqlens=self.cu_seqlens.to(device))


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    """Some prompts end to end, then their responses end to end."""

    prompts: RowBlock
    responses: RowBlock | None
    """None: no response has an input token."""
    prompt_of_response: Tensor
    """int64 [responses] row in `prompts`."""
    mask: Tensor
    """[responses or 1, 1, response width, prompt width + response width] 0 where a response token attends, else -inf."""
    prompt_lengths: Tensor
    """int64 [responses or 1] tokens of each response's prompt."""
    window_masks: dict[int, Tensor] = field(default_factory=dict)
    """By window: `mask` within it, made when a layer asks first."""

    @classmethod
    def of(cls, start: int, prompt_lengths: Sequence[int], responses: Sequence[tuple[int, int]]) -> PrefixBlock:
        """Prompts of these lengths from token `start` on, then one response per (prompt row, length > 0)."""
        prompts = RowBlock.of(start, prompt_lengths)
        if not responses:
            none = torch.zeros(0, dtype=torch.int64)
            return cls(prompts, None, none, torch.zeros(0), none)
        own = RowBlock.of(prompts.stop, [length for _, length in responses])
        prompt_of_response = torch.tensor([row for row, _ in responses])
        visible = torch.tensor(prompt_lengths)[prompt_of_response]
        if prompts.pad is None:
            visible = visible[:1]
        on_prompt = (torch.arange(prompts.width) < visible[:, None])[:, None, :].expand(-1, own.width, -1)
        on_own = torch.ones(own.width, own.width, dtype=torch.bool).tril().expand(len(visible), -1, -1)
        allowed = torch.cat([on_prompt, on_own], dim=2)[:, None]
        mask = torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))
        return cls(prompts, own, prompt_of_response, mask, visible)

    @property
    def parts(self) -> tuple[RowBlock, ...]:
        """The prompts and, if there are any, the responses."""
        return (self.prompts,) if self.responses is None else (self.prompts, self.responses)

    def attend(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor], scores: Scores
    ) -> list[Tensor]:
        """[tokens, heads, d] of each of `parts` -> outputs [tokens, heads * d] of each."""
        outputs = [_causal(self.prompts, queries[0], keys[0], values[0], scores)]
        if self.responses is not None:
            k, v = (self._prompt_and_own(x[0], x[1], self.responses) for x in (keys, values))
            mask = self._mask_within(scores.window)
            rows = scaled_dot_product(self.responses.to_rows(queries[1]), k, v, causal=False, mask=mask, scores=scores)
            outputs.append(self.responses.to_tokens(rows))
        return outputs

    def _mask_within(self, window: int | None) -> Tensor:
        """`mask`, and -inf at keys that stand `window` or more positions before a response's token."""
        own, device = self.mask.shape[2], self.mask.device
        if window is None or window >= self.prompts.width + own:
            return self.mask
        if window not in self.window_masks:
            of_own = torch.arange(own, device=device)
            to_prompt = of_own[:, None] - torch.arange(self.prompts.width, device=device)
            to_own = (of_own[:, None] - of_own).expand(len(self.prompt_lengths), -1, -1)
            distance = torch.cat([self.prompt_lengths[:, None, None] + to_prompt, to_own], dim=2)[:, None]
            self.window_masks[window] = self.mask.masked_fill(distance >= window, float("-inf"))
        return self.window_masks[window]

    def _prompt_and_own(self, prompts: Tensor, own: Tensor, responses: RowBlock) -> Tensor:
        prompt = self.prompts.to_rows(prompts).index_select(0, self.prompt_of_response)
        return torch.cat([prompt, responses.to_rows(own)], dim=1)

    def to(self, device: torch.device, dtype: torch.dtype) -> PrefixBlock:
        """The same block with its index tensors on `device` and its mask in `dtype`."""
        return PrefixBlock(
            self.prompts.to(device),
            None if self.responses is None else self.responses.to(device),
            self.prompt_of_response.to(device),
            self.mask.to(device, dtype),
            self.prompt_lengths.to(device),
        )


@dataclass(frozen=True, slots=True)
class SharedPrefixLayout:
    """b = 1: a prompt once, then its responses; a response token attends to the prompt and causally to its own response."""

    blocks: tuple[PrefixBlock, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `AttentionLayout`."""
        parts = [part for block in self.blocks for part in block.parts]
        pieces = [_cut(x, parts) for x in (query, key, value)]
        outputs, first = [], 0
        for block in self.blocks:
            stop = first + len(block.parts)
            queries, keys, values = (x[first:stop] for x in pieces)
            outputs += block.attend(queries, keys, values, scores)
            first = stop
        return _joined(outputs)

    def to(self, device: torch.device, dtype: torch.dtype) -> SharedPrefixLayout:
        """See `AttentionLayout`."""
        return SharedPrefixLayout(tuple(b.to(device, dtype) for b in self.blocks))


def similar_lengths(lengths: Sequence[int]) -> list[range]:
    """Cut sorted `lengths` into runs that waste little when padded to their longest row. Returns ranges of indices."""
    runs: list[range] = []
    first, total = 0, 0
    for i, length in enumerate(lengths):
        longest = max(length, lengths[first])
        if i > first and (i + 1 - first) * longest > _MAX_WASTE * (total + length):
            runs.append(range(first, i))
            first, total = i, 0
        total += length
    if lengths:
        runs.append(range(first, len(lengths)))
    return runs


def _cut(tokens: Tensor, blocks: Sequence[RowBlock]) -> Sequence[Tensor]:
    """[tokens, 1, heads, d] -> [tokens, heads, d] of each block; the blocks follow one another without gaps."""
    pieces: Sequence[Tensor] = tokens.squeeze(1).split([block.stop - block.start for block in blocks])
    return pieces


def _causal(block: RowBlock, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    rows = causal_attention(block.to_rows(q), block.to_rows(k), block.to_rows(v), scores)
    return block.to_tokens(rows)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return whole.unsqueeze(1)


class _Pad(torch.autograd.Function):
    """Rows end to end -> padded rows. Padded places are never used, so the backward takes the real places only."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, pad: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        return x.index_select(0, pad)

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, grad: Tensor) -> tuple[Tensor, None, None]:
        (unpad,) = ctx.saved_tensors
        return grad.index_select(0, unpad), None, None


class _Unpad(torch.autograd.Function):
    """Padded rows -> rows end to end; the backward leaves zeros at padded places."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        ctx.places = x.shape[0]  # type: ignore[attr-defined]
        return x.index_select(0, unpad)

    @staticmethod
    def backward(ctx: torch.autograd.function.BackwardCFunction, grad: Tensor) -> tuple[Tensor, None]:
        (unpad,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.places, *grad.shape[1:])  # type: ignore[attr-defined]
        return out.index_copy_(0, unpad, grad), None
