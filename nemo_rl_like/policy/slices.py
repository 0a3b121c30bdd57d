"""Which slice of which parameter this rank's distributed optimizer owns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.model.mcore import DistributedOptimizer


@dataclass(frozen=True, slots=True)
class Slice:
    """One parameter's part that this data-parallel rank updates."""

    parameter: torch.nn.Parameter
    main: Tensor
    """What the optimizer updates, float32 [end - start]: the parameter's own memory, or the master copy of bfloat16 weights."""
    start: int
    """Its first place in the flat parameter."""
    end: int
    """One past its last."""


def slices_of(part: DistributedOptimizer) -> Iterator[Slice]:
    """The slices of one of Megatron's optimizers, in an order that tensor-parallel neighbours share."""
    for parameter in part.model_param_gbuf_map:
        owned = part._get_model_param_range_map(parameter)["param"]
        group, order = part.model_param_group_index_map[parameter]
        yield Slice(parameter, part.optimizer.param_groups[group]["params"][order], owned.start, owned.end)
