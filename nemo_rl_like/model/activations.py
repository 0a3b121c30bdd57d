"""Bytes of activations on one rank, counted without torch: what autograd keeps of a forward pass, and what its widest moments add.

Every count says which function saves the tensor. Sizes are those of this package's layers on the CPU (`model.local_layers`, "local"); those
of Transformer Engine's layers on a GPU differ in attention and SwiGLU, and were read from its source, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_experts import ExpertsConfig
from nemo_rl_like.spec.policy import LayoutSpec, Module, RecomputeSpec

Layers = Literal["local", "transformer_engine"]

FLOAT32, INT64 = 4, 8
"""Bytes of an element."""

GENERATORS = 2 * 5056
"""Bytes of random states that Megatron keeps of a part that is computed again: torch's and its own; on a GPU they are a few, or the host's."""

KEPT_EXPONENTIALS = 1 << 29
"""Exponentials that the output head may keep for its backward, in bytes; those of one chunk are kept at any size."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Rows that attend in one call, as wide as the longest of them."""

    rows: int
    queries: int
    """Places of a row that attend, in tokens."""
    keys: int
    """Places of a row that are attended to, in tokens."""
    padded: bool = False
    """The rows' lengths differ, so that queries are copied to padded places; keys and values too."""
    mask_rows: int = 0
    """Rows of the mask of responses that share their prompts, whose keys and values are put before their own; 0: plain causal rows."""


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """What the memory of a forward and backward pass depends on."""

    tokens: int
    """Places of the pass, with padding between rows if any."""
    scored: int
    """Places whose hidden states reach the head."""
    blocks: tuple[AttentionBlock, ...]

    @classmethod
    def packed(cls, tokens: int, longest: int) -> MicroBatchShape:
        """`tokens` end to end in rows of `longest`, every one of them scored."""
        rows, rest = divmod(tokens, longest)
        blocks = [AttentionBlock(rows, longest, longest)] if rows else []
        if rest:
            blocks.append(AttentionBlock(1, rest, rest))
        return cls(tokens, tokens, tuple(blocks))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How the head reads the vocabulary."""

    chunk_tokens: int = 1024
    """`policy.logprob_chunk_tokens`."""
    entropy: bool = False
    """The loss has a gradient through the entropy."""


@dataclass(frozen=True, slots=True)
class Activations:
    """The activations of one micro-batch on one rank of a layout."""

    config: ModelConfig
    layout: LayoutSpec
    rows: MicroBatchShape
    itemsize: int
    """Bytes of an activation."""
    layers: Layers = "local"
    head: HeadShape = HeadShape()
    recompute: RecomputeSpec | None = None

    # -- kept from the forward pass to the backward

    def kept(self, stage: int) -> int:
        """What one micro-batch holds on one of the pipeline's `layout.stages` between its forward and its backward, without the head's chunks."""
        whole, again = self._layers(stage)
        # A layer that is computed again keeps its input.
        held = self._inputs() + self._rotary() + whole * self.layer() + again * (self._residual + self._generators(1))
        if stage < self.layout.stages - 1:
            return held + self._residual  # the output sent to the next stage stays in the schedule's list
        final_norm = self._residual + FLOAT32 * self._part  # _RmsNorm: x, scale
        return held + final_norm + self._scored * self.itemsize  # the head's `hidden`

    def layer(self) -> int:
        """What one layer keeps, without what is inside modules that are computed again."""
        inside = (self._again_in_attention(), self._again_in_feed_forward())
        return self._whole_layer() - sum(inside) + self._generators(sum(part > 0 for part in inside))

    def _generators(self, parts: int) -> int:
        return GENERATORS * parts * (self.layers == "local")

    def _whole_layer(self) -> int:
        return 2 * self._norm() + self.attention() + self.feed_forward()

    def _norm(self) -> int:
        """Before attention, and before the feed-forward part: _RmsNorm keeps its input and scale; _Linear (linear_qkv, linear_fc1),
        _GatheredLinear or the router keep its output."""
        return self._residual + FLOAT32 * self._part + self._residual

    def _again_in_attention(self) -> int:
        """What one layer does not keep of attention, whose inputs and output stay."""
        return self.attention() - self._around_attention() if self._again("core_attn") else 0

    def _again_in_feed_forward(self) -> int:
        """What one layer does not keep of its feed-forward part, whose input stays."""
        if not self._again("mlp" if self.config.experts is None else "moe"):
            return 0
        # Transformer Engine has the norm of dense layers inside linear_fc1.
        fused = self.layers == "transformer_engine" and self.config.experts is None
        return self.feed_forward() + fused * (self._norm() - self._residual)

    def _around_attention(self) -> int:
        """Queries, keys and values as attention's checkpoint saves them, and its output, which linear_proj saves."""
        q, k = self._queries, self._keys
        copied = self._keys > self.config.head_dim  # with one group of heads, queries are a view
        if self.config.traits.qk_norm:
            # The norms' inputs and scales; rotated queries and keys are tensors of their own.
            norms = (q + 2 * k + q * copied) * self.itemsize + FLOAT32 * (q + k) // self.config.head_dim
            return self._tokens * (norms + (2 * q + k) * self.itemsize)
        # Keys are a view of one tensor with the queries (_SplitHeads) or, on Transformer Engine, with queries and values.
        return self._tokens * (2 * q + 2 * k + q * copied) * self.itemsize

    def attention(self) -> int:
        """Queries, keys, values, output and log-sum-exp of one layer's attention, as scaled_dot_product_attention saves them."""
        if self.layers == "transformer_engine":
            return self._transformer_engine_attention()
        cp, e = self.layout.cp, self.itemsize
        q, k = self._queries // cp, self._keys // cp  # of whole rows, some heads
        total = 0
        for block in self.rows.blocks:
            places = block.rows * block.queries
            total += places * q * e + FLOAT32 * places * self._heads // cp  # output, log-sum-exp
            total += places * q * e * block.padded  # _Pad of queries
            if block.padded or block.mask_rows:  # _Pad, or prompt and own, of keys and values
                total += 2 * block.rows * block.keys * k * e
        padded = any(block.padded for block in self.rows.blocks) or self._tokens * cp > self.rows.tokens
        # _Unpad, pad or cat, or _AllToAll: linear_proj saves another tensor than the attention's output
        if padded or cp > 1 or len(self.rows.blocks) > 1:
            total += self._tokens * self._queries * e
        return total + self._tokens * self._projected()

    def _projected(self) -> int:
        """Bytes of a token's whole queries, keys and values that stay alive because attention, or a norm, saved them or a view of them."""
        q, k, e = self._queries, self._keys, self.itemsize
        query = any(not block.padded for block in self.rows.blocks)
        key = any(not block.padded and not block.mask_rows for block in self.rows.blocks)
        copied = self._keys > self.config.head_dim  # with one group of heads, queries are a view too
        if self.config.qk_norm:
            # The key's norm keeps a view of what linear_qkv gave, the queries' norm a copy (one more view with one group), each a scale.
            norms = (q + 2 * k + q * copied) * e + FLOAT32 * (q + k) // self.config.head_dim
            return norms + (q * query + k * key * (1 + (self.layout.cp > 1))) * e
        if self.layout.cp > 1:  # _AllToAll gave queries, keys and values a tensor each
            return (q * query + 2 * k * key) * e
        # _SplitHeads: rotated queries and keys are one tensor, of which the keys are a view; queries and values are copies.
        turned = key or (query and not copied)
        return ((q + k) * turned + q * (query and copied) + k * key) * e

    def _transformer_engine_attention(self) -> int:
        """Rotated queries and keys, values, output; log-sum-exp. Megatron's norm of queries and keys saves what enters it."""
        q, k = self._queries, self._keys
        normed = q + (q + 2 * k) if self.config.qk_norm else 0
        return self._tokens * ((2 * q + 2 * k + normed) * self.itemsize + FLOAT32 * self._heads)

    def feed_forward(self) -> int:
        """What one layer's feed-forward part keeps beyond its input."""
        if self.config.experts is not None:
            return self._experts(self.config.experts)
        # _SwiGlu: gate and up; _Linear (linear_fc2): their product. Megatron's own also saves silu(gate) and a copy of up.
        widths = 3 if self.layers == "local" else 5
        return self._tokens * widths * self._ffn * self.itemsize

    def _experts(self, experts: ExpertsConfig) -> int:
        """Router, and the tokens of this rank's experts if they spread evenly."""
        # Gate and up, product, product times the token's weight; Megatron's own: two more, as in `feed_forward`.
        per_expert = 4 if self.layers == "local" else 6
        routed = self._routed + self._pairs * per_expert * self._ffn * self.itemsize
        weights = self._pairs * (FLOAT32 + INT64)  # `permute`: weights and the token of each place
        chosen = experts.per_token * (FLOAT32 + INT64)  # softmax's output and topk's indices
        # By token and expert: a transposed copy of the weights (masked_select), two masks of one byte; where the softmax is over all experts,
        # its output too.
        all_experts = experts.count * (FLOAT32 + 2 + FLOAT32 * (not experts.normalize))
        return routed + weights + self._part * (chosen + all_experts)

    def _inputs(self) -> int:
        """Index tensors, and masks in float32 and in the activations' type."""
        mask = FLOAT32 + self.itemsize * (self.itemsize != FLOAT32)
        masks = sum(block.mask_rows * block.queries * block.keys * mask for block in self.rows.blocks)
        return INT64 * (2 * self.rows.tokens + 3 * self.rows.scored) + masks

    def _rotary(self) -> int:
        """Cosines and sines, each half as wide as the turned part of a head."""
        return self._tokens * self.config.rotary_dim * self.itemsize

    # -- what a moment adds to that

    def widest(self, stage: int) -> int:
        """The most that any moment of a micro-batch's backward, or the head, adds to `kept`; never below 0."""
        whole, again = self._layers(stage)
        moments = []
        if whole:
            moments += [self._in_feed_forward(), self._in_first_linear(), self._in_attention()]
        if again:
            moments += [moment - whole * self.layer() for moment in self._in_checkpoint()]
        if stage == self.layout.stages - 1:
            # By then the final norm and the head have given back what they kept.
            freed = self._residual + FLOAT32 * self._part + self._scored * self.itemsize
            moments = [moment - freed for moment in moments] + [self.head_peak(), self._in_final_norm()]
        if stage == 0:
            moments.append(self._in_embedding() - (self.kept(stage) - self._inputs() - self._rotary()))
        return max(0, *moments)

    def head_peak(self) -> int:
        """The most that the head adds: chunks of vocabulary-sized numbers, gradients of the hidden states."""
        hidden = self._scored_here * self.config.hidden_size * FLOAT32
        if self.config.score_head:  # a float32 copy of 16-bit states, and its gradient
            return hidden if self.itemsize == FLOAT32 else 2 * hidden
        return max(self._head_forward(), self._head_backward())

    def _head_forward(self) -> int:
        """The chunks whose exponentials are kept, and at most one more, which is not given back before the next is made."""
        sizes, kept = self._chunks()
        logits = [FLOAT32 * size * self._vocabulary for size in sizes]
        making = [size * self._vocabulary * self.itemsize * (self.itemsize != FLOAT32) for size in sizes]
        held, most = 0, 0
        for i, own in enumerate(logits):
            is_kept = i >= len(sizes) - kept
            last = logits[i - 1] if i and i - 1 < len(sizes) - kept else 0
            most = max(most, held + last + own + making[i])
            held += own * is_kept
        return most

    def _head_backward(self) -> int:
        """The kept chunks, the gradient of the hidden states, and what one chunk's products need."""
        sizes, kept = self._chunks()
        if not sizes:
            return 0
        hidden, rows, vocabulary = self.config.hidden_size, sizes[-1], self._vocabulary
        exponentials = FLOAT32 * vocabulary * sum(sizes[-kept:])
        entropy = 2 * FLOAT32 * rows * vocabulary * self.head.entropy  # probabilities and surprise
        states = 2 * FLOAT32 * rows * hidden  # a float32 copy of the states, and it times a gradient
        if self.itemsize != FLOAT32:  # the matrix, and the weight's gradient before it is added to the float32 buffer
            states += self.itemsize * (rows * vocabulary + vocabulary * hidden)
        return exponentials + FLOAT32 * self._scored_here * hidden + entropy + states

    def _chunks(self) -> tuple[list[int], int]:
        """Tokens of each chunk, the short one first, and how many of the last ones keep their exponentials."""
        whole, rest = divmod(self._scored_here, self.head.chunk_tokens)
        sizes = [rest] * (rest > 0) + [self.head.chunk_tokens] * whole
        room = KEPT_EXPONENTIALS // (FLOAT32 * self.head.chunk_tokens * self._vocabulary)
        return sizes, min(len(sizes), max(1, room))

    def _in_final_norm(self) -> int:
        """The gradient of the last hidden states and _RmsNorm's float32 tensors; the head has given back what it kept."""
        wide = self._part * self.config.hidden_size * FLOAT32  # the product
        if self.itemsize != FLOAT32:  # copies of x and the gradient too, and the result
            wide = 3 * wide + self._residual
        return self._residual + wide - self._scored * self.itemsize

    def _in_feed_forward(self) -> int:
        """Last layer: the gradient of its output, and _SwiGlu's backward (linear_fc2 has given back its input), or what experts send."""
        e = self.itemsize
        again = self._computed_again(self._again_in_feed_forward())
        if self.config.experts is None:
            return again + self._residual + 2 * self._tokens * self._ffn * e
        # Gradients of the experts' outputs, before and after they are sorted.
        sorting = 2 * self._routed
        each = -(-self._pairs // (self.config.experts.count // self.layout.ep))
        # One expert's: the product with the token's weight has three float32 tensors, and linear_fc2 has given back its input.
        weighing = self._routed + each * self._ffn * (3 * FLOAT32 - e)
        # In the forward pass: tokens before they are sent and as they arrive, the outputs of single experts, and put together.
        joining = (2 + (self.layout.ep > 1) + (self.layers == "local")) * self._routed
        return again + max(self._residual + sorting, self._residual + weighing, joining)

    def _in_first_linear(self) -> int:
        """Last layer: the backward of linear_fc1, which gathers its input once more under sequence parallelism; what follows it is gone."""
        if self.config.experts is not None:
            return 0
        ffn = self._tokens * self._ffn * self.itemsize
        whole = self._tokens * self.config.hidden_size * self.itemsize
        gathered = whole + self._residual if self.layout.sp else 0
        to_weight = 0  # added straight to a float32 buffer of the weight's own type
        if self.itemsize != FLOAT32:
            to_weight = 2 * self._ffn * self.config.hidden_size * self.itemsize
        again = self._computed_again(self._again_in_feed_forward())
        return again + self._residual - ffn + whole + gathered + to_weight

    def _in_attention(self) -> int:
        """Last layer: gradients of queries, keys, values and outputs; the feed-forward part and its norm are gone."""
        q, k = self._queries, self._keys
        gone = self.feed_forward() - self._again_in_feed_forward() + self._norm()
        again = self._computed_again(self._again_in_attention())
        places = sum(block.rows * (2 * block.queries * q + 2 * block.keys * k) for block in self.rows.blocks)
        return again + self._residual + places // self.layout.cp * self.itemsize - gone

    def _computed_again(self, inside: int) -> int:
        """What a module computed again holds: what is `inside` it, and its output."""
        return inside + self._residual if inside else 0

    def _in_embedding(self) -> int:
        """The gradient of the embedding: autograd makes it whole before it is added to the float32 buffer."""
        rows = self.config.padded_vocab(self.layout.tp) // self.layout.tp
        return self._residual + rows * self.config.hidden_size * self.itemsize

    def _in_checkpoint(self) -> list[int]:
        """Last layer of those that are computed again: all that it keeps, its output and, to the end, the output's gradient."""
        moments = (self._in_feed_forward(), self._in_first_linear(), self._in_attention() + self._residual)
        return [self._whole_layer() + moment for moment in moments]

    # -- sizes of this rank

    def _layers(self, stage: int) -> tuple[int, int]:
        """Layers of a stage that are kept, and those that are computed again but for their inputs."""
        count = len(self.config.layers_of_stage(stage, self.layout.stages))
        if self.recompute is None or self.recompute.kind != "full":
            return count, 0
        again = min(self.recompute.layers or count, count)
        return count - again, again

    def _again(self, module: Module) -> bool:
        """Whether a module of every layer is computed again."""
        return self.recompute is not None and self.recompute.kind == "selective" and module in self.recompute.modules

    @property
    def _tokens(self) -> int:
        """Places of the linear layers: this rank's part of every row, padded so that tensor-parallel ranks get equal parts."""
        parts = self.layout.cp * (self.layout.tp if self.layout.sp else 1)
        return -(-self.rows.tokens // parts) * parts // self.layout.cp

    @property
    def _part(self) -> int:
        """Places between the linear layers."""
        return self._tokens // self.layout.tp if self.layout.sp else self._tokens

    @property
    def _residual(self) -> int:
        """Bytes of the residual stream."""
        return self._part * self.config.hidden_size * self.itemsize

    @property
    def _scored(self) -> int:
        """Numbers in the hidden states that reach the head."""
        return self._scored_here * self.config.hidden_size

    @property
    def _scored_here(self) -> int:
        """Places that this rank's head scores, if context-parallel ranks have equally many."""
        return -(-self.rows.scored // self.layout.cp)

    @property
    def _pairs(self) -> int:
        """Tokens that this rank's experts get if all get as many; ranks that share an expert get the same ones."""
        return 0 if self.config.experts is None else self._part * self.config.experts.per_token * self.layout.expert_tp

    @property
    def _routed(self) -> int:
        """Bytes of the hidden states of those."""
        return self._pairs * self.config.hidden_size * self.itemsize

    @property
    def _heads(self) -> int:
        return self.config.heads // self.layout.tp

    @property
    def _queries(self) -> int:
        return self._heads * self.config.head_dim

    @property
    def _keys(self) -> int:
        return self.config.kv_heads // self.layout.tp * self.config.head_dim

    @property
    def _ffn(self) -> int:
        return self.config.ffn_width // (self.layout.tp if self.config.experts is None else self.layout.expert_tp)

    @property
    def _vocabulary(self) -> int:
        return self.config.padded_vocab(self.layout.tp) // self.layout.tp
