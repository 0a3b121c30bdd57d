"""Bytes of one layer's attention on one rank, counted without torch: what the backward pass needs, and what it makes on the way.

Every count says which function saves the tensor; see `model.activations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nemo_rl_like.model.hf_latent import LatentConfig
from nemo_rl_like.model.pass_sizes import FLOAT32, AttentionBlock, PassSizes

Layers = Literal["local", "transformer_engine"]
QUERIES = 512
"""Queries of a row that attend in one call where a mask, sinks or a cap need it; those of `attention_rows`."""
_MATRICES = 4
"""float32 numbers that capped attention's backward has at once for each pair of a query and a key."""


@dataclass(frozen=True, slots=True)
class AttentionActivations:
    """Attention between what enters the layer's first matrices and what leaves its last one."""

    sizes: PassSizes
    window: int | None
    """Of this layer, in tokens."""
    layers: Layers

    def kept(self) -> int:
        """What autograd keeps of it."""
        sizes = self.sizes
        if self.layers == "transformer_engine":
            return self._transformer_engine() + self._narrow()
        saved = self._with_sinks if self._sinks else self._saved
        total = sum(saved(block) for block in sizes.rows.blocks)
        if self._another_output():
            total += sizes.tokens * self._output_width() * sizes.itemsize
        return total + (0 if self._sinks else sizes.tokens * self._projected()) + self._narrow()

    def around(self) -> int:
        """Queries, keys and values as attention's checkpoint saves them, and its output, which linear_proj saves."""
        sizes, config = self.sizes, self.sizes.config
        q, k, e = sizes.queries, sizes.keys, sizes.itemsize
        if config.latent is not None:
            return sizes.tokens * (q + 2 * k + self._output_width()) * e + self._narrow()
        copied = k > config.head_dim  # with one group of heads, queries are a view
        if config.qk_norm:
            # The norms' inputs and scales; rotated queries and keys are tensors of their own.
            norms = (q + 2 * k + q * copied) * e + FLOAT32 * (q + k) // config.head_dim
            return sizes.tokens * (norms + (2 * q + k) * e)
        # Keys are a view of one tensor with the queries (_SplitHeads) or, on Transformer Engine, with queries and values.
        return sizes.tokens * (2 * q + 2 * k + q * copied) * e

    def gradients(self) -> int:
        """What the backward pass makes: gradients of queries, keys, values and outputs; with a cap, matrices of scores."""
        cp, sizes = self.sizes.layout.cp, self.sizes
        q, k = sizes.queries // cp, sizes.keys // cp
        places = sum(block.rows * (2 * block.queries * q + 2 * block.keys * k) for block in sizes.rows.blocks)
        if self.layers == "transformer_engine" or self._cap is None:
            return places * sizes.itemsize
        # _CappedAttention: tanh, the softmax, its gradient, and a sum on its way to a softmax, of the queries of one call.
        matrices = [max(block.rows * q * k for q, k in self._calls(block)) for block in sizes.rows.blocks]
        return places * sizes.itemsize + _MATRICES * FLOAT32 * sizes.heads // cp * max(matrices, default=0)

    def window_masks(self) -> int:
        """Bytes of masks that all layers with this window share: those of responses behind shared prompts."""
        if self.window is None or self.layers == "transformer_engine":
            return 0
        return sum(
            block.mask_rows * block.queries * block.keys * self.sizes.itemsize
            for block in self.sizes.rows.blocks
            if self.window < block.keys
        )

    @property
    def _sinks(self) -> bool:
        return self.sizes.config.traits.sinks

    @property
    def _cap(self) -> float | None:
        return self.sizes.config.attention.score_cap

    def _in_calls(self, block: AttentionBlock) -> bool:
        """Whether rows attend some queries at a time, under a mask of each call."""
        narrow = self.window is not None and self.window < block.queries
        return not block.mask_rows and (self._sinks or self._cap is not None or narrow)

    def _calls(self, block: AttentionBlock) -> Iterator[tuple[int, int]]:
        """Queries and keys of a row in each call of `causal_attention` or `_capped`."""
        for start in range(0, block.queries, QUERIES):
            stop = min(start + QUERIES, block.queries)
            if block.mask_rows:
                yield stop - start, block.keys
            else:
                yield stop - start, stop - max(0, start - min(self.window or stop, block.queries) + 1)

    def _saved(self, block: AttentionBlock) -> int:
        """What one block's rows keep beside their projections."""
        sizes, cp = self.sizes, self.sizes.layout.cp
        e, heads = sizes.itemsize, sizes.heads // cp
        q, k = sizes.queries // cp, sizes.keys // cp  # of whole rows, some heads
        places = block.rows * block.queries
        mask = sum(n * m for n, m in self._calls(block)) * e if self._in_calls(block) else 0
        total = mask + places * q * e * block.padded  # _band; _Pad of queries
        if self._cap is None:
            total += places * q * e + FLOAT32 * places * heads  # scaled_dot_product_attention: output, log-sum-exp
        if block.padded or block.mask_rows:  # _Pad, or prompt and own, of keys and values
            total += 2 * block.rows * block.keys * k * e
        return total

    def _with_sinks(self, block: AttentionBlock) -> int:
        """Queries, keys and values with one more channel, one more key and value, the output, log-sum-exp, and a mask of each call."""
        sizes, cp = self.sizes, self.sizes.layout.cp
        heads, groups = sizes.heads // cp, sizes.kv_heads // cp
        q, k = sizes.queries // cp + heads, sizes.keys // cp + groups
        total = FLOAT32 * block.rows * block.queries * heads
        calls = [(block.queries, block.keys)] if block.mask_rows else list(self._calls(block))
        for queries, keys in calls:
            total += block.rows * (2 * queries * q + 2 * (keys + 1) * k) * sizes.itemsize
            total += (block.mask_rows or 1) * queries * (keys + 1) * sizes.itemsize
        return total

    def _another_output(self) -> bool:
        """Whether linear_proj saves another tensor than the attention does: _Unpad, pad, cat, _AllToAll or a part of its channels gave it."""
        sizes, blocks = self.sizes, self.sizes.rows.blocks
        padded = any(block.padded for block in blocks) or sizes.tokens * sizes.layout.cp > sizes.rows.tokens
        several = any(self._in_calls(block) and block.queries > QUERIES for block in blocks)
        partly = self._sinks or self._cap is not None or self._output_width() < sizes.queries
        return padded or several or partly or sizes.layout.cp > 1 or len(blocks) > 1

    def _output_width(self) -> int:
        latent = self.sizes.config.latent
        return self.sizes.queries if latent is None else self.sizes.heads * latent.value_width

    def _projected(self) -> int:
        """Bytes of a token's whole queries, keys and values that stay alive because attention, or a norm, saved them or a view of them."""
        sizes, config = self.sizes, self.sizes.config
        q, k, e = sizes.queries, sizes.keys, sizes.itemsize
        query = any(not block.padded for block in sizes.rows.blocks)
        key = any(not block.padded and not block.mask_rows for block in sizes.rows.blocks)
        copied = k > config.head_dim  # with one group of heads, queries are a view too
        if config.qk_norm:
            # The key's norm keeps a view of what linear_qkv gave, the queries' norm a copy (one more view with one group), each a scale.
            norms = (q + 2 * k + q * copied) * e + FLOAT32 * (q + k) // config.head_dim
            return norms + (q * query + k * key * (1 + (sizes.layout.cp > 1))) * e
        if sizes.layout.cp > 1 or config.latent is not None:  # _AllToAll, or cat and pad, gave each a tensor of its own
            return (q * query + 2 * k * key) * e
        # _SplitHeads: rotated queries and keys are one tensor, of which the keys are a view; queries and values are copies.
        turned = key or (query and not copied)
        return ((q + k) * turned + q * (query and copied) + k * key) * e

    def _narrow(self) -> int:
        """With latent attention: what each narrow vector's norm keeps, its input and scale, and the matrix behind it, which keeps its output."""
        latent = self.sizes.config.latent
        if latent is None:
            return 0
        widths = [latent.key_value_rank + latent.rotary_width + latent.key_value_rank]
        if latent.query_rank is not None:
            widths.append(2 * latent.query_rank)
        return self.sizes.part * (sum(widths) * self.sizes.itemsize + FLOAT32 * len(widths))

    def _transformer_engine(self) -> int:
        """Rotated queries and keys, values, output; log-sum-exp. Megatron's norm of queries and keys saves what enters it."""
        sizes, config = self.sizes, self.sizes.config
        q, k = sizes.queries, sizes.keys
        normed = q + (q + 2 * k) if config.qk_norm else 0
        values = _value_width(config.latent, sizes)
        return sizes.tokens * (
            (q + k + values + self._output_width() + normed) * sizes.itemsize + FLOAT32 * sizes.heads
        )


def _value_width(latent: LatentConfig | None, sizes: PassSizes) -> int:
    return sizes.keys if latent is None else sizes.kv_heads * latent.value_width
