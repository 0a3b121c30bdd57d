"""Low-rank adapters beside Megatron's linear layers: y = W x + scale B A x, with W frozen. Hu et al. 2021, arXiv 2106.09685.

DoRA (Liu et al. 2024, arXiv 2402.09353) learns the length of each row apart: y = m / |W + scale B A| (W x + scale B A x), in which the row
lengths | | are constants to the gradient.

Each projection that a Hugging Face model has by itself (`q_proj`, `gate_proj`, ..) gets an A and a B of its own, also where Megatron computes
several in one product, so that files are those of PEFT. Tensor parallelism cuts B by rows where it cuts W by rows, and A by columns where
it cuts W by columns; the other of the two is whole on every rank and gets the same gradient there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import FFN_PROJECTIONS, QKV_PROJECTIONS, ModelConfig
from nemo_rl_like.model.mcore import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from nemo_rl_like.model.scratch import DrawnReader
from nemo_rl_like.model.weight_entries import ADAPTER, Entry, Packing
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import LoraSpec

_ATTENTION = {"self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"), "self_attention.linear_proj": ("o_proj",)}
_MLP = {"mlp.linear_fc1": ("gate_proj", "up_proj"), "mlp.linear_fc2": ("down_proj",)}
PROJECTIONS: Mapping[str, tuple[str, ...]] = {**_ATTENTION, **_MLP}
"""Hugging Face projections of each of Megatron's linear layers, in the order of its rows."""
_CUT_BY_COLUMNS = ("self_attention.linear_proj", "mlp.linear_fc2")


class LowRank(nn.Module):
    """A and B of one projection, and with DoRA the lengths m of its rows: this rank's part."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, dtype: torch.dtype, device: torch.device, *, lengths: bool
    ) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.empty(outputs, rank, dtype=dtype, device=device))
        self.m = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if lengths else None


class Adapter(nn.Module):
    """The adapters of one linear layer.

    Args: `rows`, this rank's rows of each projection, in order; `parts`, those that have an adapter; `groups`, key/value heads that queries,
    keys and values are packed by, 0 where projections stand one behind the other; `by_columns`, whether W is cut by columns.
    """

    def __init__(
        self, rows: Mapping[str, int], parts: Mapping[str, LowRank], *, scale: float, groups: int, by_columns: bool
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.enabled = True
        self.sequence_parallel = False
        """Whether the layer's input (or, where it is cut by columns, its output) is this rank's part of the sequence."""
        self.held_lengths: Tensor | None = None
        """What `row_lengths` gives, while no weight changes."""
        self._of: Mapping[str, LowRank] = dict(parts)
        self._rows, self._scale, self._groups, self._by_columns = dict(rows), scale, groups, by_columns
        self.with_lengths = any(part.m is not None for part in parts.values())
        """Whether it is DoRA's."""

    def output(self, base: Tensor, bias: Tensor | None, delta: Tensor, weight: Tensor) -> Tensor:
        """The layer's output with the adapters: `base` [..., out] is its own, `bias` in it, `delta` what `forward` gives, `weight` its W."""
        if not self.with_lengths:
            return base + delta
        lengths = self.row_lengths(weight) if self.held_lengths is None else self.held_lengths
        factors = self._row_factors(lengths).to(base.dtype)
        bare = base if bias is None else base - bias
        return base + (factors - 1) * bare + factors * delta  # exactly `base` as long as the adapters are new

    def merged(self, weight: Tensor) -> Tensor:
        """float32: the weight that computes as the layer with its adapters does. With DoRA collective over the tensor-parallel ranks."""
        whole = weight.float() + self.weight()
        if not self.with_lengths:
            return whole
        return whole * self._row_factors(self._lengths_of(whole)).detach()[:, None]

    @torch.no_grad()
    def row_lengths(self, weight: Tensor) -> Tensor:
        """float32 [out]: length of each whole row of W + scale B A, in the order of the layer's rows on this rank."""
        return self._lengths_of(weight.float() + self.weight())

    def _lengths_of(self, whole: Tensor) -> Tensor:
        squares = whole.square().sum(1, dtype=torch.float64)  # the same however rows are cut
        if self._by_columns:
            dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        return squares.sqrt().float()

    @torch.no_grad()
    def start_lengths(self, weight: Tensor) -> None:
        """Make every m the length of its row now."""
        for name, lengths in self._unpacked(self.row_lengths(weight)).items():
            part = self._of.get(name)
            if part is not None and part.m is not None:
                part.m.copy_(lengths)

    def _row_factors(self, lengths: Tensor) -> Tensor:
        """float32 [out]: m over the row's length; 1 where there is no adapter."""
        factors = []
        for name, mine in self._unpacked(lengths).items():
            part = self._of.get(name)
            if part is None or part.m is None:
                factors.append(torch.ones_like(mine))
            else:
                factors.append(part.m.float() / mine.to(part.m.dtype).float())  # both rounded: new ones give exactly 1
        return self._packed(factors)

    def _unpacked(self, rows: Tensor) -> dict[str, Tensor]:
        """[out] by projection; undoes `_packed`."""
        if not self._groups:
            return dict(zip(self._rows, rows.split(list(self._rows.values())), strict=True))
        sizes = [count // self._groups for count in self._rows.values()]
        parts = rows.unflatten(0, (self._groups, -1)).split(sizes, dim=1)
        return {name: part.flatten() for name, part in zip(self._rows, parts, strict=True)}

    def forward(self, x: Tensor, places: torch.Size) -> Tensor:
        """[..., in] -> what is added to the layer's output [*places, out], which with sequence parallelism has other places."""
        deltas = []
        for name, rows in self._rows.items():
            part = self._of.get(name)
            if part is None:
                deltas.append(x.new_zeros(*places, rows))
                continue
            inner = x @ part.a.t()
            deltas.append(self._across_ranks(inner) @ part.b.t())
        return self._packed(deltas) * self._scale

    def share_sequences(self) -> None:
        """Work on parts of sequences. What is whole on every rank (A, or B behind columns) then sees a part only, and Megatron sums its gradient."""
        self.sequence_parallel = True
        for part in self._of.values():
            for whole in (part.b, part.m) if self._by_columns else (part.a,):
                if whole is not None:
                    whole.sequence_parallel = True  # type: ignore[attr-defined]

    def _across_ranks(self, inner: Tensor) -> Tensor:
        """A's output as B takes it: summed where A is cut, and with sequence parallelism gathered or cut as the layer's own output is."""
        if self._by_columns:
            inward = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        else:
            inward = (
                gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
            )
        found: Tensor = inward(inner)
        return found

    def weight(self) -> Tensor:
        """float32, of the layer's weight's shape on this rank: what merging adds to it."""
        some = next(iter(self._of.values())).a
        deltas = []
        for name, rows in self._rows.items():
            part = self._of.get(name)
            none = some.new_zeros(some.shape[1], rows, dtype=torch.float32)
            deltas.append(none if part is None else (part.b.float() @ part.a.float()).t())
        return self._packed(deltas).t() * self._scale

    def _packed(self, deltas: Sequence[Tensor]) -> Tensor:
        """Projections along the last axis, in the order of the layer's rows."""
        if not self._groups:
            return torch.cat(list(deltas), dim=-1)
        return torch.cat([delta.unflatten(-1, (self._groups, -1)) for delta in deltas], dim=-1).flatten(-2)


def add_adapters(model: MegatronModel, config: ModelConfig, lora: LoraSpec, seed: int) -> None:
    """Put adapters on the model and freeze all else. A is drawn from `seed`, the same at every layout, and B is zero, as in PEFT."""
    check_targets(config, lora)
    model.requires_grad_(False)
    for layer in model.layers:
        for path, projections in PROJECTIONS.items():
            if not set(projections) & set(lora.targets):
                continue
            linear = layer.get_submodule(path)
            linear.lora = _adapter(linear.weight.shape[1], path, config, lora, model.dtype)
            linear.register_forward_hook(_add_delta)
            if model.config.sequence_parallel:
                linear.lora.share_sequences()
    adapters = AdapterMap(config, lora)
    adapters.mark_shards(model)
    adapters.load_hf(model, _FreshAdapters(adapters, seed))
    if lora.dora:
        for _, linear in _adapted(model):
            linear.lora.start_lengths(linear.weight)


def check_targets(config: ModelConfig, lora: LoraSpec) -> None:
    """Raise InputError for a projection that cannot have an adapter in this model."""
    where = ""
    without: set[str] = set()
    if config.experts is not None:
        without, where = set(FFN_PROJECTIONS), "in experts of a {family} model, and experts have no adapters"
    elif config.traits.packed:
        without = {*QKV_PROJECTIONS, "gate_proj", "up_proj"}
        where = "parts of one matrix in the files of a {family} model, where PEFT has one adapter for all of them"
    elif not config.traits.gated:
        without, where = {"gate_proj"}, "not in a {family} model, whose feed-forward layers have no gate"
    wrong = [name for name in lora.targets if name in without]
    if wrong:
        others = [name for name in config.projections if name not in without]
        raise InputError(
            f"policy.lora.targets has {', '.join(wrong)}, which are {where.format(family=config.family)}; "
            f"use targets: [{', '.join(others)}]"
        )


def _adapter(inputs: int, path: str, config: ModelConfig, lora: LoraSpec, dtype: torch.dtype) -> Adapter:
    """`inputs`: columns of the layer's weight on this rank."""
    by_columns = path in _CUT_BY_COLUMNS
    tp = parallel_state.get_tensor_model_parallel_world_size()
    cut = 1 if by_columns else tp
    shapes = {name: config.projections[name] for name in PROJECTIONS[path] if name in config.projections}
    rows = {name: outputs // cut for name, (outputs, _) in shapes.items()}
    parts: dict[str, LowRank] = {
        name: LowRank(inputs, count, lora.rank, dtype, runtime.device(), lengths=lora.dora)
        for name, count in rows.items()
        if name in lora.targets
    }
    groups = config.kv_heads // tp if path == "self_attention.linear_qkv" else 0
    return Adapter(rows, parts, scale=lora.scale, groups=groups, by_columns=by_columns)


def _add_delta(linear: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> object:
    """Forward hook: Megatron's linear layers give (output, bias left to the caller)."""
    adapter: Adapter = linear.lora
    if not adapter.enabled:
        return outputs
    bias = None if linear.skip_bias_add else linear.bias
    delta = adapter(inputs[0], outputs[0].shape[:-1])
    return adapter.output(outputs[0], bias, delta, linear.weight), outputs[1]


@contextmanager
def adapters_off(model: MegatronModel) -> Iterator[None]:
    """Inside the block the model computes without its adapters: it is the base that they started from."""
    found = [module for module in model.modules() if isinstance(module, Adapter)]
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.enabled = True


@contextmanager
def lengths_held(model: MegatronModel) -> Iterator[None]:
    """Inside the block, in which no weight may change, DoRA's row lengths are computed once. Collective over tensor-parallel ranks."""
    found = [linear for _, linear in _adapted(model) if linear.lora.with_lengths]
    for linear in found:
        linear.lora.held_lengths = linear.lora.row_lengths(linear.weight)
    try:
        yield
    finally:
        for linear in found:
            linear.lora.held_lengths = None


def _adapted(model: MegatronModel) -> Iterator[tuple[str, Any]]:
    """The linear layers that have adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora", None), Adapter):
            yield name, module


class MergedWeights(Mapping[str, Tensor]):
    """The base's parameters by name, with the adapters' products added, each made when it is read."""

    def __init__(self, model: MegatronModel) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if ADAPTER not in name}
        self._adapters = {f"{name}.weight": linear.lora for name, linear in _adapted(model)}

    def __getitem__(self, name: str) -> Tensor:
        weight = self._parameters[name].detach()
        if name not in self._adapters:
            return weight
        with torch.no_grad():
            return self._adapters[name].merged(weight).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class AdapterMap(WeightMap):
    """PEFT's names and shapes <-> this rank's adapters."""

    def __init__(self, config: ModelConfig, lora: LoraSpec) -> None:
        super().__init__(config, tuple(_entries(config, lora)))

    def owns(self, name: str) -> bool:
        """Whether a Megatron parameter belongs to this map."""
        return ADAPTER in name


class _FreshAdapters(DrawnReader):
    """New adapters: A uniform within +-1 / sqrt(in), B zero."""

    def __init__(self, adapters: AdapterMap, seed: int) -> None:
        super().__init__(adapters.hf_shapes(), seed, "new adapters")

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The tensor, float32."""
        if not name.endswith("lora_A.weight"):
            return torch.zeros(shape)  # the lengths are set when the base's are known
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _entries(config: ModelConfig, lora: LoraSpec) -> Iterator[Entry]:
    for layer in range(config.layers):
        for path, projections in PROJECTIONS.items():
            block = "mlp" if path in _MLP else "self_attn"
            for name in projections:
                if name not in lora.targets:
                    continue
                outputs, inputs = config.projections[name]
                hf = f"base_model.model.model.layers.{layer}.{block}.{name}"
                mine = f"{path}{ADAPTER}parts.{name}"
                by_columns = path in _CUT_BY_COLUMNS
                a, b = (f"{hf}.lora_{x}.weight" for x in "AB")
                yield Entry("columns" if by_columns else "whole", (a,), ((lora.rank, inputs),), (f"{mine}.a",), layer)
                over_rows: Packing = "whole" if by_columns else "rows"
                yield Entry(over_rows, (b,), ((outputs, lora.rank),), (f"{mine}.b",), layer)
                if lora.dora:
                    yield Entry(over_rows, (f"{hf}.lora_magnitude_vector",), ((outputs,),), (f"{mine}.m",), layer)
