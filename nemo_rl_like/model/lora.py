"""Low-rank adapters beside Megatron's linear layers: y = W x + scale B A x, with W frozen. Hu et al. 2021, arXiv 2106.09685.

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
from nemo_rl_like.model.weight_map import ADAPTER, Entry, WeightMap
from nemo_rl_like.spec.policy import LoraSpec

_ATTENTION = {"self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"), "self_attention.linear_proj": ("o_proj",)}
_MLP = {"mlp.linear_fc1": ("gate_proj", "up_proj"), "mlp.linear_fc2": ("down_proj",)}
PROJECTIONS: Mapping[str, tuple[str, ...]] = {**_ATTENTION, **_MLP}
"""Hugging Face projections of each of Megatron's linear layers, in the order of its rows."""
_CUT_BY_COLUMNS = ("self_attention.linear_proj", "mlp.linear_fc2")


class LowRank(nn.Module):
    """A and B of one projection: this rank's part."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.empty(outputs, rank, dtype=dtype, device=device))


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
        self._of: Mapping[str, LowRank] = dict(parts)
        self._rows, self._scale, self._groups, self._by_columns = dict(rows), scale, groups, by_columns

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
            whole: Any = part.b if self._by_columns else part.a
            whole.sequence_parallel = True

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
    for layer in model.decoder.layers:
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
        name: LowRank(inputs, count, lora.rank, dtype, runtime.device())
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
    return outputs[0] + adapter(inputs[0], outputs[0].shape[:-1]), outputs[1]


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


class MergedWeights(Mapping[str, Tensor]):
    """The base's parameters by name, with the adapters' products added, each made when it is read."""

    def __init__(self, model: MegatronModel) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if ADAPTER not in name}
        self._adapters = {
            f"{name}.weight": module.lora
            for name, module in model.named_modules()
            if isinstance(getattr(module, "lora", None), Adapter)
        }

    def __getitem__(self, name: str) -> Tensor:
        weight = self._parameters[name].detach()
        if name not in self._adapters:
            return weight
        with torch.no_grad():
            return (weight.float() + self._adapters[name].weight()).to(weight.dtype)

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
        if name.endswith("lora_B.weight"):
            return torch.zeros(shape)
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
                yield Entry("whole" if by_columns else "rows", (b,), ((outputs, lora.rank),), (f"{mine}.b",), layer)
