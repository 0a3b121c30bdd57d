"""Muon inside Megatron's distributed optimizer: matrices of layers are orthogonalised whole, all else is AdamW's.

Momentum needs no neighbour: each data-parallel rank keeps that of its slices. The directions are put together in DDP's gradient buffer (a
gather as wide as that of the weights), then over tensor-parallel ranks, and cut into the matrices that a Hugging Face model has; every rank
that owns a slice of a matrix orthogonalises it and keeps its slice. So the update is the same at any layout. Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, arXiv 2502.16982, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.algorithms.orthogonal import newton_schulz
from nemo_rl_like.model.gradients import gradient_buffer
from nemo_rl_like.model.mcore import DistributedOptimizer
from nemo_rl_like.model.weight_entries import Entry
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.policy.slices import Slice, slices_of
from nemo_rl_like.spec.optimizer import MuonOptimizer

MOMENTUM = "momentum_buffer"


class Muon:
    """Takes the place of the AdamW inside one of Megatron's optimizers, which it keeps for the groups that are not Muon's.

    Args: `part`, Megatron's optimizer with AdamW inside, whose groups say `muon`; `entries`, what each parameter is made of.
    """

    def __init__(
        self,
        part: DistributedOptimizer,
        spec: MuonOptimizer,
        weight_map: WeightMap,
        entries: Mapping[torch.nn.Parameter, Entry],
    ) -> None:
        self.adamw: torch.optim.Optimizer = part.optimizer
        self.param_groups: list[dict[str, Any]] = self.adamw.param_groups
        self.state = self.adamw.state
        self._part, self._spec, self._map, self._entries = part, spec, weight_map, entries
        self._dtype = torch.float32 if spec.ns_dtype == "float32" else torch.bfloat16
        slices = {owned.main: owned for owned in slices_of(part)}
        mine = [group for group in self.param_groups if group["muon"]]
        self._owned = [(slices[main], group) for group in mine for main in group["params"]]
        self.adamw.param_groups = [group for group in self.param_groups if not group["muon"]]

    @torch.no_grad()
    def step(self) -> None:
        """Move every weight by its gradient. Collective over data- and tensor-parallel ranks."""
        self.adamw.step()
        for owned, _ in self._owned:
            direction = self._with_momentum(owned)
            _buffer(owned.parameter).view(-1)[owned.start : owned.end].copy_(direction)
        self._gather_directions()
        for owned, group in self._owned:
            update = self._update(owned)
            owned.main.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _with_momentum(self, owned: Slice) -> Tensor:
        """The slice of what is orthogonalised, after the gradient has entered the momentum; as torch.optim.Muon does it."""
        gradient, state, share = owned.main.grad, self.state[owned.main], self._spec.momentum
        assert gradient is not None, "prepare_grads comes before step"
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        momentum: Tensor = state[MOMENTUM].lerp_(gradient, 1 - share)
        return gradient.lerp(momentum, share) if self._spec.nesterov else momentum

    def _gather_directions(self) -> None:
        """Fill the gradient buffers with every data-parallel rank's slices: gradients are summed by now, and not read again."""
        group = self._part.data_parallel_group
        if group.size() == 1:
            return
        for buffer in self._part.buffers:
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(group.size())[group.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)

    def _update(self, owned: Slice) -> Tensor:
        """What the slice is moved by, per unit of learning rate."""
        entry = self._entries[owned.parameter]
        matrices = self._map.wholes(entry, _buffer(owned.parameter).to(self._dtype))
        updates = [self._orthogonal(matrix) for matrix in matrices]
        return self._map.local_part(entry, updates).reshape(-1)[owned.start : owned.end]

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        scale = self._spec.update_rms * math.sqrt(max(matrix.shape))
        return newton_schulz(matrix, self._spec.ns_steps).float() * scale


def _buffer(parameter: torch.nn.Parameter) -> Tensor:
    """DDP's buffer for the parameter's gradient."""
    buffer = gradient_buffer(parameter)
    assert buffer is not None, "the optimizer's parameters are those of DDP"
    return buffer
