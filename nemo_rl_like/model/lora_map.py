"""Which projections have adapters, and PEFT's names and shapes for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import FFN_PROJECTIONS, QKV_PROJECTIONS, ModelConfig
from nemo_rl_like.model.lora_stacked import STACKED
from nemo_rl_like.model.scratch import DrawnReader
from nemo_rl_like.model.weight_entries import ADAPTER, Entry, Packing
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import Latent, LoraSpec, Plain, Stacked

_ATTENTION = {"self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"), "self_attention.linear_proj": ("o_proj",)}
_LATENT = {
    "self_attention.linear_q_proj": ("q_proj",),
    "self_attention.linear_q_down_proj": ("q_a_proj",),
    "self_attention.linear_q_up_proj": ("q_b_proj",),
    "self_attention.linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "self_attention.linear_kv_up_proj": ("kv_b_proj",),
    "self_attention.linear_proj": ("o_proj",),
}
_MLP = {"mlp.linear_fc1": ("gate_proj", "up_proj"), "mlp.linear_fc2": ("down_proj",)}
PROJECTIONS: Mapping[str, tuple[str, ...]] = {**_ATTENTION, **_LATENT, **_MLP}
"""Hugging Face projections of each of Megatron's linear layers, in the order of its rows."""
CUT_BY_COLUMNS = ("self_attention.linear_proj", "mlp.linear_fc2")
"""Linear layers whose weight tensor parallelism cuts by columns."""
WHOLE = ("self_attention.linear_q_down_proj", "self_attention.linear_kv_down_proj")
"""Linear layers that every tensor-parallel rank has whole."""
NUMBERS = {name: i for i, name in enumerate((*get_args(Plain), *get_args(Latent), *get_args(Stacked)))}
LOCAL_EXPERTS = "experts.local_experts"
"""Experts of a rank, in a layer's `mlp`."""


def check_targets(config: ModelConfig, lora: LoraSpec) -> None:
    """Raise InputError for a projection that cannot have an adapter in this model, or not one of this kind."""
    without = _without(config)
    absent = f"not in a {config.family} model"
    reasons: dict[str, list[str]] = {}
    for name in lora.targets:
        if name in without or name not in _known(config):
            reasons.setdefault(without.get(name, absent), []).append(name)
    if reasons:
        found = " and ".join(f"{', '.join(names)}, which are {reason}" for reason, names in reasons.items())
        others = [name for name in _known(config) if name not in without]
        raise InputError(f"policy.lora.targets has {found}; use targets: [{', '.join(others)}]")
    if in_experts(config, lora):
        _check_experts(config, lora)


def _known(config: ModelConfig) -> tuple[str, ...]:
    """Projections that the model has, also several in one."""
    return (*config.projections, *(STACKED[:1] if is_stacked(config) else ()))


def is_stacked(config: ModelConfig) -> bool:
    """Whether its experts lie in one tensor of each kind."""
    return config.experts is not None and config.experts.swiglu is not None


def _without(config: ModelConfig) -> dict[str, str]:
    """Projections that have no adapters in this model, and why."""
    if is_stacked(config):
        where = f"parts of one tensor in the files of a {config.family} model, where PEFT has one adapter for both"
        return dict.fromkeys(("gate_proj", "up_proj"), where)
    if config.experts is not None and not config.experts.alone:
        where = f"also in shared experts or dense layers of a {config.family} model, where they have no adapters"
        return dict.fromkeys(FFN_PROJECTIONS, where)
    if config.traits.packed:
        where = (
            f"parts of one matrix in the files of a {config.family} model, where PEFT has one adapter for all of them"
        )
        return dict.fromkeys((*QKV_PROJECTIONS, "gate_proj", "up_proj"), where)
    if not config.traits.gated:
        return {"gate_proj": f"not in a {config.family} model, whose feed-forward layers have no gate"}
    return {}


def linears_of(config: ModelConfig, lora: LoraSpec) -> tuple[str, ...]:
    """Paths in a layer of Megatron's linear layers that have an adapter; those of experts by that of a dense layer's."""
    attention = _ATTENTION if config.latent is None else _LATENT
    mlp = {} if is_stacked(config) else _MLP
    return tuple(path for path, names in (*attention.items(), *mlp.items()) if set(names) & set(lora.targets))


def of_experts(config: ModelConfig, path: str) -> bool:
    """Whether every expert has this one of Megatron's linear layers."""
    return config.experts is not None and path in _MLP


def in_experts(config: ModelConfig, lora: LoraSpec) -> tuple[str, ...]:
    """Targets that every expert of a layer has."""
    named = (*FFN_PROJECTIONS, *STACKED)
    return () if config.experts is None else tuple(name for name in lora.targets if name in named)


def _check_experts(config: ModelConfig, lora: LoraSpec) -> None:
    found = in_experts(config, lora)
    without = f"or leave {', '.join(found)} out of policy.lora.targets, which are in experts of a {config.family} model"
    if ("gate_proj" in found) != ("up_proj" in found):
        given, other = ("gate_proj", "up_proj") if "gate_proj" in found else ("up_proj", "gate_proj")
        raise InputError(
            f"policy.lora.targets has {given} without {other}; in experts PEFT reads both as one matrix: add {other}, {without}"
        )
    if lora.dora:
        raise InputError(f"policy.lora.dora is true, which PEFT has not for experts; set it to false, {without}")
    if lora.dropout:
        raise InputError(
            f"policy.lora.dropout is {lora.dropout:g}, which PEFT has not for experts; set it to 0, {without}"
        )


class AdapterMap(WeightMap):
    """PEFT's names and shapes <-> this rank's adapters."""

    def __init__(self, config: ModelConfig, lora: LoraSpec) -> None:
        super().__init__(config, tuple(_entries(config, lora)))

    def owns(self, name: str) -> bool:
        """Whether a Megatron parameter belongs to this map."""
        return ADAPTER in name


class FreshAdapters(DrawnReader):
    """New adapters: A uniform within +-1 / sqrt(in), B zero."""

    def __init__(self, adapters: AdapterMap, seed: int) -> None:
        super().__init__(adapters.hf_shapes(), seed, "new adapters")

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The tensor, float32."""
        if not name.endswith("lora_A.weight"):
            return torch.zeros(shape)  # the lengths are set when the base's are known
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _entries(config: ModelConfig, lora: LoraSpec) -> Iterator[Entry]:
    names = config.traits.experts
    for layer in range(config.layers):
        prefix = f"base_model.model.model.layers.{layer}"
        if names is not None and is_stacked(config):
            yield from _stacked_entries(config, lora, f"{prefix}.{names.block}.experts", layer)
        for path in linears_of(config, lora):
            if path not in _MLP:
                yield from _linear_entries(config, lora, path, f"{prefix}.self_attn", path, layer)
                continue
            if names is None or config.experts is None:
                yield from _linear_entries(config, lora, path, f"{prefix}.mlp", path, layer)
                continue
            mine = path.replace("mlp.", f"mlp.{LOCAL_EXPERTS}.{{expert}}.")
            for i in range(config.experts.count):
                yield from _linear_entries(config, lora, path, f"{prefix}.{names.block}.experts.{i}", mine, layer, i)


def _stacked_entries(config: ModelConfig, lora: LoraSpec, block: str, layer: int) -> Iterator[Entry]:
    """Adapters of a layer's experts that lie in one tensor of each kind, as checkpoints hold them; see `lora_stacked.as_peft`."""
    if config.experts is None:
        return
    count, hidden, width = config.experts.count, config.hidden_size, config.experts.width
    for name, inputs, outputs in zip(STACKED, (hidden, width), (2 * width, hidden), strict=True):
        if name not in lora.targets:
            continue
        mine = f"mlp.experts{ADAPTER}parts.{name}"
        for part, shape in (("A", (lora.rank, inputs)), ("B", (outputs, lora.rank))):
            hf = (f"{block}.{name}.lora_{part}.weight",)
            yield Entry("experts", hf, ((count, *shape),), (f"{mine}.{part.lower()}",), layer)


def _linear_entries(
    config: ModelConfig, lora: LoraSpec, path: str, block: str, mine: str, layer: int, expert: int | None = None
) -> Iterator[Entry]:
    """Adapters of one linear layer: `block` is its module in Hugging Face's model, `mine` its name in Megatron's layer."""
    by_columns = path in CUT_BY_COLUMNS
    over_columns: Packing = "columns" if by_columns else "whole"
    over_rows: Packing = "whole" if by_columns or path in WHOLE else "rows"
    for name in PROJECTIONS[path]:
        if name not in lora.targets:
            continue
        outputs, inputs = config.projections[name]
        hf = f"{block}.{hf_projection(config, name)}"
        parts = f"{mine}{ADAPTER}parts.{name}"
        yield Entry(over_columns, (f"{hf}.lora_A.weight",), ((lora.rank, inputs),), (f"{parts}.a",), layer, expert)
        yield Entry(over_rows, (f"{hf}.lora_B.weight",), ((outputs, lora.rank),), (f"{parts}.b",), layer, expert)
        if lora.dora:
            yield Entry(over_rows, (f"{hf}.lora_magnitude_vector",), ((outputs,),), (f"{parts}.m",), layer, expert)


def hf_projection(config: ModelConfig, name: str) -> str:
    """What files of this family call a projection: that of an expert may have another name (`w1`)."""
    if config.traits.experts is None or name not in FFN_PROJECTIONS:
        return name
    return config.traits.experts.projections[FFN_PROJECTIONS.index(name)]
