"""Bytes of a frozen model on one rank of a layout, whole or with its layers' matrices in NF4, counted without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.memory import ITEMSIZE, Dtype
from nemo_rl_like.model.nf4_map import BLOCK, GROUP, held_in_nf4
from nemo_rl_like.model.weight_entries import EMBEDDING, Entry, entries_of
from nemo_rl_like.spec.policy import LayoutSpec, Nf4Spec


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
