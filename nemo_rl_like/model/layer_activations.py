"""Bytes of one layer on one rank, counted without torch: what it keeps between its passes, and what its widest moments add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from nemo_rl_like.model.attention_activations import AttentionActivations, Layers
from nemo_rl_like.model.feed_forward_activations import DenseActivations, ExpertActivations
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.pass_sizes import FLOAT32, PassSizes
from nemo_rl_like.spec.policy import Module, RecomputeSpec

GENERATORS = 2 * 5056
"""Bytes of random states that Megatron keeps of a part that is computed again: torch's and its own; on a GPU they are a few, or the host's."""


class LayerKind(NamedTuple):
    """What makes a layer's memory differ from another's."""

    window: int | None
    """Tokens that it attends to; None: all before."""
    experts: bool


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Of every layer."""
    attention = config.attention
    dense = config.layers if config.experts is None else config.experts.first_dense
    return _kinds(config.layers, attention.window, attention.windowed, dense)


@lru_cache(maxsize=64)
def _kinds(layers: int, window: int | None, windowed: tuple[bool, ...], dense: int) -> tuple[LayerKind, ...]:
    """`windowed`: of each layer, empty where none is; `dense`: how many layers have no experts, from the first on."""
    within = windowed or (False,) * layers
    return tuple(LayerKind(window if within[i] else None, i >= dense) for i in range(layers))


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """The activations of a layer of one kind."""

    sizes: PassSizes
    kind: LayerKind
    layers: Layers
    recompute: RecomputeSpec | None

    @property
    def attention(self) -> AttentionActivations:
        """Its attention."""
        return AttentionActivations(self.sizes, self.kind.window, self.layers)

    @property
    def feed_forward(self) -> DenseActivations | ExpertActivations:
        """Its feed-forward part."""
        experts = self.sizes.config.experts
        if experts is not None and self.kind.experts:
            return ExpertActivations(self.sizes, self.layers, experts)
        return DenseActivations(self.sizes, self.layers)

    def whole(self) -> int:
        """What it keeps where nothing is computed again."""
        return 2 * (self._norm() + self._post_norm()) + self.attention.kept() + self.feed_forward.kept()

    def kept(self) -> int:
        """The same without what is inside modules that are computed again."""
        inside = (self._again_in_attention(), self._again_in_feed_forward())
        return self.whole() - sum(inside) + self.generators(sum(part > 0 for part in inside))

    def of_input(self) -> int:
        """What it keeps where it is computed again as a whole."""
        return self.sizes.residual + self.generators(1)

    def generators(self, parts: int) -> int:
        """Random states of so many parts that are computed again."""
        return GENERATORS * parts * (self.layers == "local")

    def moments(self) -> Iterator[int]:
        """What moments of its backward pass add to what it keeps, and all layers before it."""
        again = _computed_again(self._again_in_feed_forward(), self.sizes.residual)
        # By then the norm behind it has given back what it kept.
        for moment in self.feed_forward.moments():
            yield again + self.sizes.residual + moment - self._post_norm()
        if self.sizes.config.traits.post_norms:
            yield self.sizes.residual + norm_backward(self.sizes)
        yield self._in_attention()

    def moments_again(self) -> Iterator[int]:
        """The same of a layer that is computed again: all that it keeps, its output and, to the end, the output's gradient."""
        *before, last = self.moments()
        for moment in (*before, last + self.sizes.residual):
            yield self.whole() + moment

    def _in_attention(self) -> int:
        """Gradients of queries, keys, values and outputs; the feed-forward part and its norms are gone."""
        gone = self.feed_forward.kept() - self._again_in_feed_forward() + self._norm() + 2 * self._post_norm()
        again = _computed_again(self._again_in_attention(), self.sizes.residual)
        return again + self.sizes.residual + self.attention.gradients() - gone

    def _norm(self) -> int:
        """Before attention, and before the feed-forward part, with the output that _Linear (linear_qkv, linear_fc1), _GatheredLinear or the router
        keep."""
        return norm_kept(self.sizes) + self.sizes.residual

    def _post_norm(self) -> int:
        """Behind attention, and behind the feed-forward part."""
        return norm_kept(self.sizes) * self.sizes.config.traits.post_norms

    def _again_in_attention(self) -> int:
        """What it does not keep of attention, whose inputs and output stay."""
        attention = self.attention
        return attention.kept() - attention.around() if self._again("core_attn") else 0

    def _again_in_feed_forward(self) -> int:
        """What it does not keep of its feed-forward part, whose input stays."""
        if not self._again(self.feed_forward.module):
            return 0
        # Transformer Engine has the norm of dense layers inside linear_fc1.
        fused = self.layers == "transformer_engine" and not self.kind.experts
        return self.feed_forward.kept() + fused * (self._norm() - self.sizes.residual)

    def _again(self, module: Module) -> bool:
        """Whether a module of every layer is computed again."""
        return self.recompute is not None and self.recompute.kind == "selective" and module in self.recompute.modules


def norm_kept(sizes: PassSizes) -> int:
    """What a norm keeps: RmsNorm its input and a scale, LayerNorm1p its input in float32, the mean and a scale."""
    if sizes.config.traits.norm == "layer_1p":
        return sizes.part * FLOAT32 * (sizes.config.hidden_size + 2)
    return sizes.residual + FLOAT32 * sizes.part


def norm_backward(sizes: PassSizes) -> int:
    """RmsNorm's float32 product; of 16-bit states also copies of x and the gradient, and the result."""
    wide = sizes.part * sizes.config.hidden_size * FLOAT32
    return wide if sizes.itemsize == FLOAT32 else 3 * wide + sizes.residual


def _computed_again(inside: int, output: int) -> int:
    """What a module computed again holds: what is `inside` it, and its output."""
    return inside + output if inside else 0
