"""Bytes of activations on one rank, counted without torch: what autograd keeps of a forward pass, and what its widest moments add.

Every count says which function saves the tensor. Sizes are those of this package's layers on the CPU (`model.local_layers`, "local"); those
of Transformer Engine's layers on a GPU differ in attention and SwiGLU, and were read from its source, not measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from nemo_rl_like.model.attention_activations import AttentionActivations, Layers
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.layer_activations import LayerActivations, LayerKind, layer_kinds, norm_backward, norm_kept
from nemo_rl_like.model.pass_sizes import FLOAT32, INT64, MicroBatchShape, PassSizes
from nemo_rl_like.spec.policy import LayoutSpec, RecomputeSpec

KEPT_EXPONENTIALS = 1 << 29
"""Exponentials that the output head may keep for its backward, in bytes; those of one chunk are kept at any size."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How the head reads the vocabulary."""

    chunk_tokens: int = 1024
    """`policy.logprob_chunk_tokens`."""
    entropy: bool = False
    """The loss has a gradient through the entropy."""


@dataclass(frozen=True)  # without slots: sizes are counted once
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

    @cached_property
    def sizes(self) -> PassSizes:
        """This rank's part of the micro-batch."""
        return PassSizes(self.config, self.layout, self.rows, self.itemsize)

    def at(self, layer: int) -> LayerActivations:
        """Those of one layer, counted from 0 over the whole model."""
        return self._of(layer_kinds(self.config)[layer])

    def _of(self, kind: LayerKind) -> LayerActivations:
        return LayerActivations(self.sizes, kind, self.layers, self.recompute)

    def kept(self, stage: int) -> int:
        """What one micro-batch holds on one of the pipeline's `layout.stages` between its forward and its backward, without the head's chunks."""
        sizes = self.sizes
        held = self._inputs() + self._rotary() + self._of_layers(stage)
        if stage < self.layout.stages - 1:
            return held + sizes.residual  # the output sent to the next stage stays in the schedule's list
        return held + norm_kept(sizes) + sizes.scored * self.itemsize  # the head's `hidden`

    def _of_layers(self, stage: int) -> int:
        """What a stage's layers keep; one that is computed again keeps its input."""
        kinds, again = self._kinds(stage), self._again(stage)
        kept = sum(count * self._of(kind).kept() for kind, count in Counter(kinds[again:]).items())
        return kept + again * self._of(kinds[0]).of_input()

    def _kinds(self, stage: int) -> tuple[LayerKind, ...]:
        layers = self.config.layers_of_stage(stage, self.layout.stages)
        return layer_kinds(self.config)[layers.start : layers.stop]

    def _again(self, stage: int) -> int:
        """How many of a stage's layers, from its first on, are computed again as a whole."""
        count = len(self.config.layers_of_stage(stage, self.layout.stages))
        if self.recompute is None or self.recompute.kind != "full":
            return 0
        return min(self.recompute.layers or count, count)

    def _inputs(self) -> int:
        """Index tensors, and masks in float32 and in the activations' type, those of windows in the latter."""
        mask = FLOAT32 + self.itemsize * (self.itemsize != FLOAT32)
        masks = sum(block.mask_rows * block.queries * block.keys * mask for block in self.rows.blocks)
        if self.config.attention.window is not None:
            masks += AttentionActivations(self.sizes, self.config.attention.window, self.layers).window_masks()
        return INT64 * (2 * self.rows.tokens + 3 * self.rows.scored) + masks

    def _rotary(self) -> int:
        """Cosines and sines, each half as wide as the turned part of a head; those of windows too where they turn in a way of their own."""
        kinds = 1 + (self.config.window_rope_theta is not None)
        return kinds * self.sizes.tokens * self.config.rotary_dim * self.itemsize

    # -- what a moment adds to that

    def widest(self, stage: int) -> int:
        """The most that any moment of a micro-batch's backward, or the head, adds to `kept`; never below 0."""
        moments = self._in_layers(stage)
        if stage == self.layout.stages - 1:
            # By then the final norm and the head have given back what they kept.
            freed = norm_kept(self.sizes) + self.sizes.scored * self.itemsize
            moments = [moment - freed for moment in moments] + [self.head_peak(), self._in_final_norm()]
        if stage == 0:
            moments.append(self._in_embedding() - (self.kept(stage) - self._inputs() - self._rotary()))
        return max(0, *moments)

    def _in_layers(self, stage: int) -> list[int]:
        """The moments of the last layer of each kind, when later layers have given back what they kept."""
        kinds, again = self._kinds(stage), self._again(stage)
        wanted = {(kind, i < again) for i, kind in enumerate(kinds)}
        kept = {kind: self._of(kind).kept() for kind in set(kinds[again:])}
        of_input = self._of(kinds[0]).of_input()
        moments, later = [], 0
        for i in reversed(range(len(kinds))):
            kind, is_again = kinds[i], i < again
            if (kind, is_again) in wanted:
                wanted.remove((kind, is_again))
                layer = self._of(kind)
                moments += [moment - later for moment in (layer.moments_again() if is_again else layer.moments())]
            if not wanted:
                break
            later += of_input if is_again else kept[kind]
        return moments

    def head_peak(self) -> int:
        """The most that the head adds: chunks of vocabulary-sized numbers, gradients of the hidden states."""
        hidden = self.sizes.scored_here * self.config.hidden_size * FLOAT32
        if self.config.score_head:  # a float32 copy of 16-bit states, and its gradient
            return hidden if self.itemsize == FLOAT32 else 2 * hidden
        return max(self._head_forward(), self._head_backward())

    def _head_forward(self) -> int:
        """The chunks whose exponentials are kept, and at most one more, which is not given back before the next is made."""
        sizes, kept = self._chunks()
        logits = [FLOAT32 * size * self.sizes.vocabulary for size in sizes]
        making = [size * self.sizes.vocabulary * self.itemsize * (self.itemsize != FLOAT32) for size in sizes]
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
        hidden, rows, vocabulary = self.config.hidden_size, sizes[-1], self.sizes.vocabulary
        capped = self.config.logit_cap is not None
        # With a cap: logits made again, and the cap's slope.
        exponentials = FLOAT32 * vocabulary * (2 * rows if capped else sum(sizes[-kept:]))
        entropy = 2 * FLOAT32 * rows * vocabulary * self.head.entropy  # probabilities and surprise
        states = 2 * FLOAT32 * rows * hidden  # a float32 copy of the states, and it times a gradient
        if self.itemsize != FLOAT32:  # the matrix, and the weight's gradient before it is added to the float32 buffer
            states += self.itemsize * (rows * vocabulary + vocabulary * hidden)
        squares = FLOAT32 * rows * vocabulary * capped  # before the slope, and gone by then
        return exponentials + FLOAT32 * self.sizes.scored_here * hidden + max(squares, entropy + states)

    def _chunks(self) -> tuple[list[int], int]:
        """Tokens of each chunk, the short one first, and how many of the last ones keep their exponentials; none with a cap."""
        whole, rest = divmod(self.sizes.scored_here, self.head.chunk_tokens)
        sizes = [rest] * (rest > 0) + [self.head.chunk_tokens] * whole
        if self.config.logit_cap is not None:  # the slope of a cap is not to be had from exponentials
            return sizes, 0
        room = KEPT_EXPONENTIALS // (FLOAT32 * self.head.chunk_tokens * self.sizes.vocabulary)
        return sizes, min(len(sizes), max(1, room))

    def _in_final_norm(self) -> int:
        """The gradient of the last hidden states and what the norm makes of it; the head has given back what it kept."""
        return self.sizes.residual + norm_backward(self.sizes) - self.sizes.scored * self.itemsize

    def _in_embedding(self) -> int:
        """The gradient of the embedding: autograd makes it whole before it is added to the float32 buffer."""
        rows = self.config.padded_vocab(self.layout.tp) // self.layout.tp
        scaled = self.sizes.residual * self.config.traits.scaled_embeddings
        return self.sizes.residual + scaled + rows * self.config.hidden_size * self.itemsize
