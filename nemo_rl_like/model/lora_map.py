"""Which projections have adapters, and PEFT's names and shapes for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import FFN_PROJECTIONS, QKV_PROJECTIONS, ModelConfig
from nemo_rl_like.model.scratch import DrawnReader
from nemo_rl_like.model.weight_entries import ADAPTER, Entry, Packing
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import LoraSpec, Projection

_ATTENTION = {"self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"), "self_attention.linear_proj": ("o_proj",)}
_MLP = {"mlp.linear_fc1": ("gate_proj", "up_proj"), "mlp.linear_fc2": ("down_proj",)}
PROJECTIONS: Mapping[str, tuple[str, ...]] = {**_ATTENTION, **_MLP}
"""Hugging Face projections of each of Megatron's linear layers, in the order of its rows."""
CUT_BY_COLUMNS = ("self_attention.linear_proj", "mlp.linear_fc2")
"""Linear layers whose weight tensor parallelism cuts by columns."""
NUMBERS = {name: i for i, name in enumerate(get_args(Projection))}
LOCAL_EXPERTS = "experts.local_experts"
"""Experts of a rank, in a layer's `mlp`."""


def check_targets(config: ModelConfig, lora: LoraSpec) -> None:
    """Raise InputError for a projection that cannot have an adapter in this model, or not one of this kind."""
    where = ""
    without: set[str] = set()
    if config.latent is not None:
        raise InputError(
            f"policy.lora is given, but a {config.family} model has latent attention, whose projections have no adapters; leave policy.lora out"
        )
    if config.traits.biases:
        raise InputError(
            f"policy.lora is given, but the projections of a {config.family} model have biases, beside which adapters are not tested; leave "
            "policy.lora out"
        )
    if config.experts is not None and not config.experts.alone:
        without = set(FFN_PROJECTIONS)
        where = "also in shared experts or dense layers of a {family} model, where they have no adapters"
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
    if in_experts(config, lora):
        _check_experts(config, lora)


def of_experts(config: ModelConfig, path: str) -> bool:
    """Whether every expert has this one of Megatron's linear layers."""
    return config.experts is not None and path in _MLP


def in_experts(config: ModelConfig, lora: LoraSpec) -> tuple[str, ...]:
    """Targets that every expert of a layer has."""
    return () if config.experts is None else tuple(name for name in lora.targets if name in FFN_PROJECTIONS)


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
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _entries(config: ModelConfig, lora: LoraSpec) -> Iterator[Entry]:
    names = config.traits.experts
    for layer in range(config.layers):
        prefix = f"base_model.model.model.layers.{layer}"
        for path in _ATTENTION:
            yield from _linear_entries(config, lora, path, f"{prefix}.self_attn", path, layer)
        for path in _MLP:
            if names is None or config.experts is None:
                yield from _linear_entries(config, lora, path, f"{prefix}.mlp", path, layer)
                continue
            mine = path.replace("mlp.", f"mlp.{LOCAL_EXPERTS}.{{expert}}.")
            for i in range(config.experts.count):
                yield from _linear_entries(config, lora, path, f"{prefix}.{names.block}.experts.{i}", mine, layer, i)


def _linear_entries(
    config: ModelConfig, lora: LoraSpec, path: str, block: str, mine: str, layer: int, expert: int | None = None
) -> Iterator[Entry]:
    """Adapters of one linear layer: `block` is its module in Hugging Face's model, `mine` its name in Megatron's layer."""
    by_columns = path in CUT_BY_COLUMNS
    over_columns: Packing = "columns" if by_columns else "whole"
    over_rows: Packing = "whole" if by_columns else "rows"
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
