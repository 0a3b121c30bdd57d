"""Bytes of training on one rank of a layout, by part and counted without torch: what a layout needs before anything is started."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.activations import Activations, HeadShape, Layers, MicroBatchShape
from nemo_rl_like.model.hf_config import FFN_PROJECTIONS, ModelConfig
from nemo_rl_like.model.nf4_map import BLOCK, GROUP, held_in_nf4
from nemo_rl_like.model.weight_entries import EMBEDDING, Entry, entries_of
from nemo_rl_like.spec.policy import LayoutSpec, Nf4Spec, RecomputeSpec

Dtype = Literal["float32", "bfloat16"]
ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight or an activation."""

GRADIENT = 4
"""Bytes of a parameter's gradient: DDP's buffer is float32 at any type of the weights (`grad_reduce_in_fp32`)."""
STATE = 4
"""Bytes of a parameter in one kind of optimizer state."""

_PARAMETER_ALIGNMENT, _BUFFER_ALIGNMENT = 64, 128
"""Megatron starts each parameter in DDP's buffers at a multiple of elements, and ends a buffer at one of these and of the ranks that share it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank while it trains."""

    parameters: int
    gradients: int
    """DDP's buffers."""
    optimizer: int
    """This rank's share of the moments, and of the master weights; 0 where they are in host memory."""
    activations: int
    """What the micro-batches in flight keep for their backward passes."""
    temporary: int
    """What the widest moment of a backward pass, or of the head, adds."""
    head: int
    """What the head adds at its own widest moment, part of `temporary` where that is the widest of all; 0 before the last rank."""
    rank: int
    """Among the pipeline-parallel ranks."""
    host: int = 0
    """Bytes of host memory, beside those of the device: with `policy.offload.optimizer` moments and float32 weights, and what is copied to and fro."""

    @property
    def parts(self) -> dict[str, int]:
        """The parts that add up to the peak, by name."""
        names = ("parameters", "gradients", "optimizer", "activations", "temporary")
        return dict(
            zip(names, (self.parameters, self.gradients, self.optimizer, self.activations, self.temporary), strict=True)
        )

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained and how, whatever the layout."""

    config: ModelConfig
    dtype: Dtype
    rows: MicroBatchShape
    micro_batches: int = 1
    """Passes of a data-parallel rank in one update."""
    head: HeadShape = field(default_factory=HeadShape)
    layers: Layers = "local"
    recompute: RecomputeSpec | None = None
    offload_optimizer: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """Kinds of optimizer state: Adam's moments, and master weights beside 16-bit ones."""
        moments = ("exp_avg", "exp_avg_sq")
        return moments if self.dtype == "float32" else (*moments, "master")

    def memory(self, layout: LayoutSpec, rank: int) -> Memory:
        """Bytes of a pipeline-parallel rank. Raises InputError if the model cannot be split that way."""
        self.config.check_layout(layout)
        _require_known(self.config)
        stages = range(rank, layout.stages, layout.pp)
        buffers = [parameter_buffers(self.config, layout, stage) for stage in stages]
        dense, experts = (sum(sizes) for sizes in zip(*buffers, strict=True))
        owned = dense // (layout.dp * layout.cp) + experts // layout.expert_dp
        item = ITEMSIZE[self.dtype]
        activations = Activations(self.config, layout, self.rows, item, self.layers, self.head, self.recompute)
        # A rank's last stage may be the pipeline's, which keeps less than another.
        kept = (
            self._in_flight(layout, rank) * activations.kept(rank)
            + activations.kept(stages[-1])
            - activations.kept(rank)
        )
        # Before the first pass, master weights are made on the device and then moved.
        master = owned * STATE if self.offload_optimizer and "master" in self.states else 0
        return Memory(
            parameters=(dense + experts) * item,
            gradients=(dense + experts) * GRADIENT,
            optimizer=0 if self.offload_optimizer else owned * STATE * len(self.states),
            activations=kept,
            temporary=max(master - kept, *(activations.widest(stage) for stage in stages)),
            head=activations.head_peak() if rank == layout.pp - 1 else 0,
            rank=rank,
            host=owned * self._host_bytes if self.offload_optimizer else 0,
        )

    def _in_flight(self, layout: LayoutSpec, rank: int) -> int:
        """Forward passes of a stage that a rank has made when its first backward pass begins, and that many it then holds.

        1F1B: it runs ahead of the last rank by as many micro-batches as there are ranks between them. Interleaved (Narayanan et al. 2021, arXiv
        2104.04473, section 2.2), by twice as many, after a round of the ranks' micro-batches for each of its stages but the last.
        """
        between = layout.pp - 1 - rank
        ahead = between if layout.vpp == 1 else 2 * between + (layout.vpp - 1) * layout.pp
        return min(ahead + 1, self.micro_batches * layout.vpp)

    @property
    def _host_bytes(self) -> int:
        """Bytes of an owned parameter: weights and moments, the gradient, and weights rounded to 16 bits."""
        return 3 * STATE + GRADIENT + (ITEMSIZE[self.dtype] if self.dtype != "float32" else 0)

    def peak(self, layout: LayoutSpec) -> Memory:
        """That of the rank that needs most. Raises InputError if the model cannot be split that way.

        It is the first of the pipeline, which holds the most micro-batches, or on the last, which has the head.
        """
        return max((self.memory(layout, rank) for rank in {0, layout.pp - 1}), key=lambda memory: memory.total)


def base_bytes(config: ModelConfig, layout: LayoutSpec, stage: int, dtype: Dtype, base: Nf4Spec | None) -> int:
    """Bytes that a frozen model takes on a rank of a pipeline stage: with `base`, its layers' matrices in NF4.

    A value in NF4 takes half a byte, and its share of a scale: 4 bytes of 64, or with double quantisation one, and of a row and of
    256 scales what `nf4.DoubleScales` has beside. With experts on several ranks, those of the first.
    """
    return sum(
        _nf4_bytes(entry, layout, base.double)
        if base is not None and held_in_nf4(entry)
        else _elements(entry, config, layout) * (4 if entry.fixed else ITEMSIZE[dtype])
        for entry in _entries_of_stage(config, layout, stage)
    )


def _entries_of_stage(config: ModelConfig, layout: LayoutSpec, stage: int) -> Iterator[Entry]:
    last, layers = layout.stages - 1, config.layers_of_stage(stage, layout.stages)
    here = 0 if config.experts is None else config.experts.count // layout.ep
    for entry in entries_of(config):
        if entry.expert is not None and entry.expert >= here:
            continue
        if entry.layer is not None:
            found = entry.layer in layers
        elif entry.hf == (EMBEDDING,):  # a tied head on a stage of its own is a second copy
            found = stage == 0 or (stage == last and config.tie_embeddings and not config.score_head)
        else:
            found = stage == last
        if found:
            yield entry


def _elements(entry: Entry, config: ModelConfig, layout: LayoutSpec) -> int:
    """Of a rank's part."""
    if entry.packing == "vocab":
        return config.padded_vocab(layout.tp) // layout.tp * config.hidden_size
    whole = sum(math.prod(shape) for shape in entry.shapes)
    if entry.packing == "whole":
        return whole
    if entry.packing == "experts":
        return whole // layout.ep
    return whole // (layout.tp if entry.expert is None else layout.expert_tp)


def _nf4_bytes(entry: Entry, layout: LayoutSpec, double: bool) -> int:
    """Of a rank's part of a matrix, in codes and scales."""
    ranks = 1 if entry.packing == "whole" else layout.tp if entry.expert is None else layout.expert_tp
    blocks = [rows * columns // BLOCK for rows, columns in entry.shapes]
    here = sum(blocks) // ranks
    codes = here * BLOCK // 2
    if not double:
        return codes + here * 4
    rows = sum(rows for rows, _ in entry.shapes) // (1 if entry.packing == "columns" else ranks)
    return codes + here + rows * 4 + sum(-(-count // GROUP) for count in blocks) * 8


def _require_known(config: ModelConfig) -> None:
    """Raise InputError for a model whose memory no count here describes."""
    unknown = {
        "a sliding window": config.attention.window is not None,
        "latent attention": config.latent is not None,
        "attention sinks": config.traits.sinks,
        "biases of every matrix": config.traits.biases,
        "capped attention scores": config.attention.score_cap is not None,
        "capped logits": config.logit_cap is not None,
        "norms with a bias or weights that count from one": config.traits.norm != "rms",
        "norms behind attention and feed-forward layers": config.traits.post_norms,
        "feed-forward layers without a gate": not config.traits.gated,
        "an expert that every token passes": config.experts is not None and config.experts.shared_width > 0,
        "experts in some layers only": config.experts is not None and config.has_dense_layers,
    }
    found = [name for name, present in unknown.items() if present]
    if found:
        raise InputError(
            f"the {config.family} model has {', '.join(found)}, and memory is estimated for models without; "
            "choose `policy.layout` by hand"
        )


def parameter_buffers(config: ModelConfig, layout: LayoutSpec, stage: int) -> tuple[int, int]:
    """Elements of a stage's two DDP buffers on one rank, with their padding: parameters that its tensor-parallel group shares out, and experts'."""
    layers = len(config.layers_of_stage(stage, layout.stages))
    own = _aligned(_ends(config, layout, stage)) + layers * _aligned(_layer_parameters(config, layout))
    experts = layers * _aligned(_expert_parameters(config, layout))
    return _up(own, math.lcm(layout.dp * layout.cp, _BUFFER_ALIGNMENT)), _up(
        experts, math.lcm(layout.expert_dp, _BUFFER_ALIGNMENT)
    )


def _aligned(sizes: Iterable[int]) -> int:
    """Elements of parameters of these sizes, one behind the other."""
    return sum(_up(size, _PARAMETER_ALIGNMENT) for size in sizes)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _ends(config: ModelConfig, layout: LayoutSpec, stage: int) -> Iterator[int]:
    """Elements of each parameter of a stage that stands before or behind the layers."""
    hidden = config.hidden_size
    vocabulary = config.padded_vocab(layout.tp) // layout.tp * hidden
    if stage == 0:
        yield vocabulary
    if stage == layout.stages - 1:
        yield hidden  # the last norm
        if config.score_head:
            yield hidden
        elif stage > 0 or not config.tie_embeddings:  # a tied head on a stage of its own is a second copy
            yield vocabulary


def _layer_parameters(config: ModelConfig, layout: LayoutSpec) -> Iterator[int]:
    """Elements of each parameter of a layer, but experts'."""
    sizes = {name: outputs * inputs // layout.tp for name, (outputs, inputs) in config.projections.items()}
    yield from (config.hidden_size, config.hidden_size)  # norms before attention and feed-forward
    yield sizes["q_proj"] + sizes["k_proj"] + sizes["v_proj"]
    yield sizes["o_proj"]
    if config.qkv_bias:
        yield (config.heads + 2 * config.kv_heads) * config.head_dim // layout.tp
    if config.qk_norm:
        yield from (config.head_dim, config.head_dim)
    if config.experts is not None:
        yield config.experts.count * config.hidden_size  # the router, whole on every rank
        return
    yield sizes["gate_proj"] + sizes["up_proj"]
    yield sizes["down_proj"]


def _expert_parameters(config: ModelConfig, layout: LayoutSpec) -> Iterator[int]:
    """Elements of each parameter of the experts of a layer that a rank holds."""
    if config.experts is None:
        return
    shapes = (config.projections[name] for name in FFN_PROJECTIONS)
    gate, up, down = (outputs * inputs // layout.expert_tp for outputs, inputs in shapes)
    for _ in range(config.experts.count // layout.ep):
        yield from (gate + up, down)
