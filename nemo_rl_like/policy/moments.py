"""Optimizer state as one tensor a parameter, so that a checkpoint can hold it under Hugging Face names at any layout.

Adam's `exp_avg` and `exp_avg_sq`, the `momentum_buffer` of SGD and Muon (and, for bfloat16 weights, the float32 `master` copy) have the
parameter's shape. Each data-parallel rank owns a flat slice of them; slices are put together bit for bit (summed as integers beside zeros).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.policy.optimizer import MASTER, PolicyOptimizer


class GatheredState(Mapping[str, Tensor]):
    """One kind of optimizer state by parameter name, gathered over the ranks that hold the parameter when it is read.

    Those must read the same names in the same order.
    """

    def __init__(self, optimizer: PolicyOptimizer, names: Mapping[torch.nn.Parameter, str], kind: str) -> None:
        self._kind = kind
        self._shapes = {name: parameter.shape for parameter, name in names.items()}
        self._experts = {name for parameter, name in names.items() if not getattr(parameter, "allreduce", True)}
        self._owned: dict[str, tuple[Tensor, int, int]] = {}
        for owned, states in optimizer.slices():
            state = owned.main.data if kind == MASTER else states.get(kind)
            if state is None:  # before the first step
                state = torch.zeros_like(owned.main.data)
            self._owned[names[owned.parameter]] = (state, owned.start, owned.end)

    def __getitem__(self, name: str) -> Tensor:
        shape, sharers = self._shapes[name], self._sharers(name)
        device = runtime.device()  # collectives run there, wherever the state lies
        if sharers.size() == 1 and name in self._owned:
            return self._owned[name][0].view(shape).to(device)
        full = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
        if name in self._owned:
            state, start, end = self._owned[name]
            full[start:end] = state.view(-1)
        bits = full.view(torch.int32)
        dist.all_reduce(bits, group=sharers)
        return full.view(shape)

    def _sharers(self, name: str) -> dist.ProcessGroup:
        """The ranks that hold the same parameter, each a slice of its state."""
        if name in self._experts:
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def put_state(
    optimizer: PolicyOptimizer,
    names: Mapping[torch.nn.Parameter, str],
    kinds: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Give every owned slice its state from full tensors: `kinds` maps a kind to {parameter name: tensor of the parameter's local shape}."""
    for owned, states in optimizer.slices():
        for kind, tensors in kinds.items():
            whole = tensors.get(names[owned.parameter])
            if whole is None:
                continue
            piece = whole.reshape(-1)[owned.start : owned.end].to(device=owned.main.device, dtype=torch.float32)
            if kind == MASTER:
                owned.main.data.copy_(piece)
            else:
                states[kind] = piece.clone()
