"""Bytes of training on one rank of a layout, by part and counted without torch: what a layout needs before anything is started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from nemo_rl_like.model.activations import Activations, HeadShape
from nemo_rl_like.model.attention_activations import Layers
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.layer_activations import LayerKind, layer_kinds
from nemo_rl_like.model.parameter_buffers import parameter_buffers, untrained
from nemo_rl_like.model.pass_sizes import FLOAT32, MicroBatchShape
from nemo_rl_like.spec.policy import LayoutSpec, RecomputeSpec

Dtype = Literal["float32", "bfloat16"]
ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight or an activation."""

GRADIENT = 4
"""Bytes of a parameter's gradient: DDP's buffer is float32 at any type of the weights (`grad_reduce_in_fp32`)."""
STATE = 4
"""Bytes of a parameter in one kind of optimizer state."""


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
        stages = range(rank, layout.stages, layout.pp)
        buffers = [parameter_buffers(self.config, layout, stage) for stage in stages]
        dense, experts = (sum(sizes) for sizes in zip(*buffers, strict=True))
        owned = dense // (layout.dp * layout.cp) + experts // layout.expert_dp
        item = ITEMSIZE[self.dtype]
        beside = FLOAT32 * sum(untrained(self.config, layout, stage) for stage in stages)
        activations = Activations(self.config, layout, self.rows, item, self.layers, self.head, self.recompute)
        # A rank's last stage may be the pipeline's, which keeps less than another.
        first, last = activations.kept(rank), activations.kept(stages[-1])
        kept = self._in_flight(layout, rank) * first + last - first
        # Before the first pass, master weights are made on the device and then moved.
        master = owned * STATE if self.offload_optimizer and "master" in self.states else 0
        return Memory(
            parameters=(dense + experts) * item + beside,
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

        Of ranks with as many layers of each kind, the earliest holds the most micro-batches; the last has the head.
        """
        return max((self.memory(layout, rank) for rank in self._fullest(layout)), key=lambda memory: memory.total)

    def _fullest(self, layout: LayoutSpec) -> set[int]:
        """Pipeline-parallel ranks of which one needs most."""
        kinds = layer_kinds(self.config)
        if len(set(kinds)) == 1:
            return {0, layout.pp - 1}
        earliest: dict[frozenset[tuple[LayerKind, int]], int] = {}
        for rank in range(layout.pp):
            stages = range(rank, layout.stages, layout.pp)
            layers = [self.config.layers_of_stage(stage, layout.stages) for stage in stages]
            counts = sum((Counter(kinds[of.start : of.stop]) for of in layers), Counter())
            earliest.setdefault(frozenset(counts.items()), rank)
        return {0, *earliest.values(), layout.pp - 1}
