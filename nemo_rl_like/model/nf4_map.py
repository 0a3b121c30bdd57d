"""Which matrices of a model are held in NF4, and what they take on a rank."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.weight_entries import Entry, entries_of
from nemo_rl_like.spec.policy import LayoutSpec

BLOCK = 64
"""Inputs of a matrix that share a scale."""
GROUP = 256
"""Scales that share one, with double quantisation."""


def held_in_nf4(entry: Entry) -> bool:
    """Whether it is the matrix of a layer's product; embeddings, heads, routers, norms and biases stay in the model's type."""
    return entry.layer is not None and ".linear_" in entry.names[0] and not entry.is_vector


def check_nf4(config: ModelConfig, layout: LayoutSpec) -> None:
    """Raise InputError for a model of which `policy.lora.base: {kind: nf4}` cannot hold every layer's matrices in whole blocks."""
    if config.experts is not None and config.experts.swiglu is not None:
        raise InputError(
            f"policy.lora.base is nf4, but the experts of a {config.family} model lie in one tensor of all of them, which has no rows of inputs; "
            "leave policy.lora.base out"
        )
    for entry, inputs in _cut_inputs(config, layout):
        if inputs % BLOCK:
            cut = "layout.etp" if entry.expert is not None else "layout.tp"
            raise InputError(
                f"policy.lora.base is nf4, whose scales are each of {BLOCK} inputs, but a rank has {inputs} inputs of {entry.hf[0]} "
                f"({cut} {_ranks(entry, layout)}); lower {cut}, or leave policy.lora.base out"
            )


def _cut_inputs(config: ModelConfig, layout: LayoutSpec) -> Iterator[tuple[Entry, int]]:
    """Each matrix in NF4, with its inputs on one rank."""
    for entry in entries_of(config):
        if held_in_nf4(entry):
            yield entry, entry.shapes[0][1] // _ranks(entry, layout)


def _ranks(entry: Entry, layout: LayoutSpec) -> int:
    """Over which its inputs are cut."""
    if entry.packing != "columns":
        return 1
    return layout.tp if entry.expert is None else layout.expert_tp
