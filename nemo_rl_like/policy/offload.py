"""An optimizer in host memory inside Megatron's distributed optimizer: master weights and moments lie there, and it steps there.

Norm and clipping stay on the device, where the gradients are. A step copies this rank's slices of them to the host, moves the master weights
there, and copies those, rounded to the model's type, into DDP's buffer of parameters; nothing else lies on the device. Ren et al. 2021, arXiv
2101.06840.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.mcore import DistributedOptimizer
from nemo_rl_like.policy.slices import Slice, slices_of

Groups: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class HostSlice:
    """One slice's part of the host's memory."""

    owned: Slice
    """Its `main` has the gradient, on the device, and for bfloat16 weights no memory of its own."""
    main: Tensor
    """float32 [end - start] weights."""
    gradient: Tensor
    """float32 [end - start]"""
    rounded: Tensor
    """[end - start] weights in the model's type; of a float32 model, `main`."""

    @classmethod
    def of(cls, owned: Slice) -> HostSlice:
        """The weights as the device has them."""
        main, gradient = runtime.host_empty(owned.main), runtime.host_empty(owned.main)
        main.copy_(owned.main.data)
        main.grad = gradient
        dtype = owned.parameter.dtype
        return cls(owned, main, gradient, main if dtype is main.dtype else runtime.host_empty(main, dtype))

    @property
    def weights(self) -> Tensor:
        """[end - start] the model's weights, on the device."""
        return self.owned.parameter.data.view(-1)[self.owned.start : self.owned.end]

    def fetch(self) -> None:
        """Start to copy the gradient to the host."""
        gradient = self.owned.main.grad
        assert gradient is not None, "prepare_grads comes before step"
        self.gradient.copy_(gradient, non_blocking=True)

    def send(self) -> None:
        """Start to copy the weights to the device."""
        if self.rounded is not self.main:
            self.rounded.copy_(self.main)
        self.weights.copy_(self.rounded, non_blocking=True)


class HostOptimizer:
    """Takes the place of the optimizer inside one of Megatron's, whose groups it keeps: there the schedule writes and the gradients are.

    Args: `part`, Megatron's optimizer; `make`, an optimizer of the same groups over slices in host memory.
    """

    def __init__(self, part: DistributedOptimizer, make: Callable[[Groups], torch.optim.Optimizer]) -> None:
        self.param_groups: Groups = part.optimizer.param_groups
        held = {owned.main: HostSlice.of(owned) for owned in slices_of(part)}
        self._slices = list(held.values())
        self.inner = make(
            [{**group, "params": [held[main].main for main in group["params"]]} for group in self.param_groups]
        )
        for one in self._slices:
            _give_back(one.owned)

    def slices(self) -> Iterator[tuple[Slice, dict[str, Any]]]:
        """This rank's slices of parameters, each `main` in host memory, with its state."""
        for held in self._slices:
            yield Slice(held.owned.parameter, held.main, held.owned.start, held.owned.end), self.inner.state[held.main]

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, with the moments that exist."""
        kept = [tensor for held in self._slices for tensor in (held.main, held.gradient)]
        kept += [held.rounded for held in self._slices if held.rounded is not held.main]
        kept += [tensor for _, state in self.slices() for name, tensor in state.items() if name != "step"]
        return sum(tensor.nbytes for tensor in kept)

    @torch.no_grad()
    def step(self) -> None:
        """Move this rank's weights by their gradients; other ranks' are to be gathered."""
        for held in self._slices:
            held.fetch()
        for own, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            own.update(lr=group["lr"], weight_decay=group["weight_decay"])
        runtime.synchronize()
        self.inner.step()
        for held in self._slices:
            held.send()
        runtime.synchronize()

    @torch.no_grad()
    def reload(self) -> None:
        """Copy the model's weights to the host (after loading weights)."""
        for held in self._slices:
            held.main.copy_(held.weights)


def _give_back(owned: Slice) -> None:
    """Free the device's float32 copy of a slice: one element, as wide as the gradient that it has, stays."""
    if owned.main.dtype != owned.parameter.dtype:
        owned.main.data = owned.main.data.new_empty(1).expand(owned.main.shape)
