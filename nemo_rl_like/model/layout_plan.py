"""Which layouts of a model fit a number of GPUs, the ones that communicate least first. Planned by arithmetic, nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from pydantic import ValidationError

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.activations import HeadShape
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.memory import Memory, Training
from nemo_rl_like.model.pass_sizes import MicroBatchShape
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec, RecomputeSpec

GIB = 1 << 30
RESERVED = 0.1
"""Share of a GPU's memory left to CUDA's context, NCCL's buffers and the allocator's gaps; an assumption, not a measurement."""
_VIRTUAL = (2, 4)
"""Stages of a pipeline-parallel rank that are tried beside one."""
_NEAREST = 3
"""Layouts that an error names."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned."""

    config: ModelConfig
    gpus: int
    gpu_gib: float = 80.0
    gpus_per_node: int = 8
    micro_batch_tokens: int = PolicySpec().micro_batch_tokens
    step_tokens: int = 1 << 20
    """Tokens of one update, over all ranks."""
    recompute: RecomputeSpec | Literal["auto"] | None = "auto"
    """`policy.recompute`; `auto`: none if a layout fits without, else as few layers as fit."""
    offload_optimizer: bool = False
    """`policy.offload.optimizer`"""

    @property
    def usable(self) -> int:
        """Bytes of a GPU that training may take."""
        return int(self.gpu_gib * GIB * (1 - RESERVED))

    def micro_batches(self, dp: int) -> int:
        """Passes of one of `dp` data-parallel ranks in an update."""
        return max(1, -(-self.step_tokens // (dp * self.micro_batch_tokens)))

    def training(self, layout: LayoutSpec, recompute: RecomputeSpec | None = None) -> Training:
        """What a rank of the layout computes: bfloat16, Adam, Transformer Engine's layers, rows end to end."""
        return Training(
            self.config,
            "bfloat16",
            MicroBatchShape.packed(self.micro_batch_tokens, self.micro_batch_tokens),
            self.micro_batches(layout.dp),
            HeadShape(PolicySpec().logprob_chunk_tokens),
            "transformer_engine",
            recompute,
            self.offload_optimizer,
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """One layout and what it costs."""

    question: Question
    layout: LayoutSpec
    memory: Memory
    recompute: RecomputeSpec | None = None

    @property
    def fits(self) -> bool:
        """Whether its peak is within the usable memory."""
        return self.memory.total <= self.question.usable

    @property
    def micro_batches(self) -> int:
        """Passes of a rank in an update."""
        return self.question.micro_batches(self.layout.dp)

    @property
    def bubble(self) -> float:
        """Share of an update in which a rank waits for the pipeline to fill and drain: (pp - 1) / (vpp * micro-batches + pp - 1)."""
        return (self.layout.pp - 1) / (self.layout.vpp * self.micro_batches + self.layout.pp - 1)

    @property
    def again(self) -> tuple[int, int]:
        """Layers of the first stage that are computed again as a whole, and all of them."""
        layers = len(self.question.config.layers_of_stage(0, self.layout.stages))
        if self.recompute is None or self.recompute.kind != "full":
            return 0, layers
        return min(self.recompute.layers or layers, layers), layers

    @property
    def recomputing(self) -> str:
        """Its recomputation for an error, if it has any."""
        again, layers = self.again
        return f" with {again} of {layers} layers computed again" if again else ""

    @property
    def expert_ranks(self) -> int:
        """Consecutive ranks among which a token travels to its experts; 1 for a dense model."""
        return 1 if self.question.config.experts is None else self.layout.ep * self.layout.expert_tp

    @property
    def inner_ranks(self) -> int:
        """Consecutive ranks that exchange activations inside every layer."""
        return self.layout.tp * self.layout.cp

    @property
    def order(self) -> tuple[bool, float, int, bool, float, int, int]:
        """Less communication first: tensor and context parallelism inside a node, then the fewest layers computed again, the least tp * cp * pp,
        experts inside a node, bubble, memory.
        """
        again, layers = self.again
        return (
            self._crosses(self.inner_ranks),
            again / layers,
            self.inner_ranks * self.layout.pp,
            self._crosses(self.expert_ranks),
            self.bubble,
            self.expert_ranks,
            self.memory.total,
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it stands where it does."""
        found = []
        inner = " * ".join(name for name, size in (("tp", self.layout.tp), ("cp", self.layout.cp)) if size > 1)
        for ranks, what in ((self.inner_ranks, inner), (self.expert_ranks, "experts")):
            if ranks > 1:
                where = "across nodes" if self._crosses(ranks) else "inside a node"
                found.append(f"{what} {where}")
        if self.layout.pp > 1:
            found.append(f"{self.bubble:.0%} bubble at {self.micro_batches} micro-batches")
        if self.recompute is not None:
            found.append(self._why_again())
        if self.memory.host:
            found.append(f"{self.memory.host / GIB:.1f} GiB of host memory a rank")
        free = (self.question.usable - self.memory.total) / GIB
        found.append(f"{free:.1f} GiB free" if self.fits else f"{-free:.1f} GiB too much")
        return tuple(found)

    def _why_again(self) -> str:
        again, layers = self.again
        what = f"{again} of {layers} layers" if again else ", ".join(self.recompute.modules if self.recompute else ())
        return f"{what} computed again"

    def _crosses(self, ranks: int) -> bool:
        """Whether `ranks` consecutive ranks lie on more than one node."""
        return self.question.gpus_per_node % ranks != 0


class NoLayout(InputError):
    """What was asked for does not divide or does not fit."""

    def __init__(self, message: str, nearest: tuple[Planned, ...]) -> None:
        shown = "; nearest that fit: " + ", ".join(named(planned.layout) for planned in nearest) if nearest else ""
        super().__init__(message + shown)
        self.problem = message
        self.nearest = nearest


def plan(question: Question, asked: Mapping[str, int]) -> tuple[Planned, ...]:
    """Every layout of the GPUs with the sizes `asked` (of tp, cp, pp, vpp, dp, ep and etp) that fits, best first.

    Raises NoLayout, which says why and what comes nearest, if there is none.
    """
    chosen = _ordered(question, asked)
    found = tuple(planned for planned in chosen if planned.fits)
    if not found:
        fitting = [planned for planned in _ordered(question, {}) if planned.fits]
        raise NoLayout(_too_big(question, chosen) if chosen else _why_not(question, asked), _nearest(fitting, asked))
    return found


def _ordered(question: Question, asked: Mapping[str, int]) -> list[Planned]:
    """Every layout of the GPUs with these sizes, whether it fits or not, best first."""
    layouts = list(_valid(question, asked))
    if question.recompute != "auto":
        return _sorted(_planned(question, layout, question.recompute) for layout in layouts)
    kept = _sorted(_planned(question, layout) for layout in layouts)
    if any(planned.fits for planned in kept):
        return kept
    return _sorted(_recomputed(question, layout) for layout in layouts)


def _sorted(found: Iterable[Planned]) -> list[Planned]:
    return sorted(found, key=lambda planned: planned.order)


def named(layout: LayoutSpec) -> str:
    """A layout as a spec writes it, without what is at its default."""
    sizes = layout.model_dump(exclude_defaults=True)
    return "{" + ", ".join(f"{key}: {str(value).lower()}" for key, value in sizes.items()) + "}"


def _planned(question: Question, layout: LayoutSpec, recompute: RecomputeSpec | None = None) -> Planned:
    return Planned(question, layout, question.training(layout, recompute).peak(layout), recompute)


def _recomputed(question: Question, layout: LayoutSpec) -> Planned:
    """The layout with the fewest layers computed again with which it fits; if it does not, with those that leave most."""
    layers = len(question.config.layers_of_stage(0, layout.stages))
    tried = []
    for count in range(1, layers + 1):
        recompute = RecomputeSpec() if count == layers else RecomputeSpec(layers=count)
        tried.append(_planned(question, layout, recompute))
        if tried[-1].fits:
            return tried[-1]
    return min(tried, key=lambda planned: planned.memory.total)


def _sizes(question: Question, asked: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes whose product is the number of GPUs, those asked for as they are; experts' over the ranks of a stage."""
    names = ("tp", "cp", "pp", "dp")
    for values in product(*(_choices(asked, name, question.gpus) for name in names)):
        sizes = dict(zip(names, values, strict=True))
        if math.prod(values) != question.gpus:
            continue
        for vpp in _virtual(question, asked, sizes["pp"], sizes["dp"]):
            yield from _expert_sizes(question, asked, {**sizes, "vpp": vpp})


def _virtual(question: Question, asked: Mapping[str, int], pp: int, dp: int) -> list[int]:
    """Stages on a rank: as few as asked for, or those that leave the pipeline full and each stage some layers."""
    if "vpp" in asked:
        return [asked["vpp"]]
    if pp == 1 or question.micro_batches(dp) < pp:  # an interleaved schedule goes round all ranks
        return [1]
    return [1, *(vpp for vpp in _VIRTUAL if question.config.layers % (pp * vpp) == 0)]


def _expert_sizes(question: Question, asked: Mapping[str, int], sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    if question.config.experts is None and not asked.keys() & {"ep", "etp"}:
        yield sizes
        return
    for ep in _choices(asked, "ep", question.gpus // sizes["pp"]):
        for etp in sorted({asked["etp"]} if "etp" in asked else {1, sizes["tp"]}):
            yield {**sizes, "ep": ep, "etp": etp}


def _choices(asked: Mapping[str, int], name: str, ranks: int) -> list[int]:
    return [asked[name]] if name in asked else [size for size in range(1, ranks + 1) if ranks % size == 0]


def _layout(config: ModelConfig, sizes: Mapping[str, int]) -> LayoutSpec:
    """The layout, with sequence parallelism wherever it is possible: it costs nothing and saves memory. Raises InputError."""
    try:
        layout = LayoutSpec.model_validate({**sizes, "sp": sizes["tp"] > 1})
    except ValidationError as error:
        raise InputError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from error
    if layout.etp == layout.tp:
        layout = layout.model_copy(update={"etp": None})
    config.check_layout(layout)
    if config.experts is None and (layout.ep > 1 or layout.expert_tp != layout.tp):
        raise InputError(
            f"layout.ep is {layout.ep} and layout.etp {layout.expert_tp}, and the model has no experts; leave them out"
        )
    return layout


def _valid(question: Question, asked: Mapping[str, int]) -> Iterator[LayoutSpec]:
    for sizes in _sizes(question, asked):
        try:
            yield _layout(question.config, sizes)
        except InputError:
            continue


def _why_not(question: Question, asked: Mapping[str, int]) -> str:
    """Why no layout has the sizes asked for."""
    shown = " * ".join(f"{name} {asked[name]}" for name in ("tp", "cp", "pp", "dp") if name in asked)
    for sizes in _sizes(question, asked):
        try:
            _layout(question.config, sizes)
        except InputError as error:
            return str(error)
    return f"{shown} does not divide the {question.gpus} GPUs; tp * cp * pp * dp must be {question.gpus}"


def _too_big(question: Question, chosen: list[Planned]) -> str:
    """What the least of these layouts needs, and the largest micro-batch at which one of them would fit."""
    least = min(chosen, key=lambda planned: planned.memory.total)
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in least.memory.parts.items())
    message = (
        f"{named(least.layout)}{least.recomputing} needs {least.memory.total / GIB:.1f} GiB a GPU ({listed}) and has {question.usable / GIB:.1f} "
        f"({question.gpu_gib:g} less {RESERVED:.0%})"
    )
    tokens = question.micro_batch_tokens
    while tokens > 1:
        tokens //= 2
        smaller = replace(question, micro_batch_tokens=tokens)
        if any(_as_chosen(smaller, planned).fits for planned in chosen):
            return f"{message}; it fits with --micro-batch-tokens {tokens}"
    return f"{message}; take more GPUs"


def _as_chosen(question: Question, planned: Planned) -> Planned:
    """The layout for another question, with its recomputation chosen as it was."""
    if question.recompute == "auto":
        return _recomputed(question, planned.layout)
    return _planned(question, planned.layout, planned.recompute)


def _distance(layout: LayoutSpec, asked: Mapping[str, int]) -> float:
    """Doublings between a layout's sizes and those asked for; 0: they are the same."""
    sizes = {
        "tp": layout.tp,
        "cp": layout.cp,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "dp": layout.dp,
        "ep": layout.ep,
        "etp": layout.expert_tp,
    }
    return sum(abs(math.log2(sizes[name] / size)) for name, size in asked.items())


def _nearest(fitting: list[Planned], asked: Mapping[str, int]) -> tuple[Planned, ...]:
    """Fitting layouts closest to what was asked for, the better of equally close ones first."""
    return tuple(sorted(fitting, key=lambda planned: _distance(planned.layout, asked))[:_NEAREST])
