"""`ShardedOptimizer`: PyTorch's AdamW or SGD over FSDP2's float32 shards, with the spec's groups and schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.model.weight_entries import Entry
from nemo_rl_like.policy.backend import OptimizerStep
from nemo_rl_like.policy.groups import Settings, settings_of
from nemo_rl_like.policy.muon import MOMENTUM
from nemo_rl_like.policy.optimizer import ADAM_STATE, scheduler_of
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec, SgdOptimizer

_TINY = 1e-6
"""Added to the norm that clipping divides by, as Megatron does."""


class ShardedOptimizer:
    """The optimizer of one rank's shards.

    Args: `parameters` by Hugging Face name, DTensors; `spec`; `total_updates`, the optimizer steps the schedule spans.
    Raises SpecError for groups that do not fit the model, and for an optimizer other than AdamW and SGD.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spec: OptimizerSpec, total_updates: int) -> None:
        self.kind = spec.kind
        self.parameters = parameters
        settings = settings_of(spec, entries_of({name: tuple(p.shape) for name, p in parameters.items()}))
        groups = _groups({entry.hf[0]: one for entry, one in settings.items()}, parameters)
        self._optimizer = _made(spec, groups)
        self._scheduler = scheduler_of(self._optimizer, spec, total_updates)
        self._max_norm = spec.clip_grad

    @property
    def updates(self) -> int:
        """Optimizer steps made so far."""
        return int(self._scheduler.num_steps)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of state that every parameter has."""
        return (MOMENTUM,) if self.kind == "sgd" else ADAM_STATE

    def zero_grad(self) -> None:
        """Drop the gradients of the last step."""
        self._optimizer.zero_grad()

    def step(self) -> OptimizerStep | None:
        """Clip and update; None if a gradient is not finite: weights, moments and schedule are then as before."""
        gradients = [_local(p.grad) for p in self.parameters.values() if p.grad is not None]
        norm = float(_norm(gradients))
        if not math.isfinite(norm):
            return None
        if 0 < self._max_norm < norm + _TINY:
            torch._foreach_mul_(gradients, self._max_norm / (norm + _TINY))
        self._scheduler.step(increment=1)
        self._optimizer.step()
        return OptimizerStep(grad_norm=norm, lr=float(self._scheduler.get_lr({})))

    def state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's state of this kind, sharded as the parameter is."""
        for name, parameter in self.parameters.items():
            held = self._optimizer.state.get(parameter, {}).get(kind)
            yield name, torch.zeros_like(parameter) if held is None else held

    def restore(self, states: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Take `states`, {kind: {parameter name: tensor sharded as the parameter is}}, as they were after `updates` optimizer steps."""
        for name, parameter in self.parameters.items():
            state = self._optimizer.state[parameter]
            state.update({kind: tensors[name] for kind, tensors in states.items()})
            if self.kind == "adamw":
                state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=_local(parameter).device)
        self._scheduler.num_steps = updates
        self._scheduler.step(increment=0)


def entries_of(shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Entry]:
    """Parameters that each are one tensor of Hugging Face, as `settings_of` takes them."""
    return [Entry("whole", (name,), (shape,), (name,)) for name, shape in shapes.items()]


def _groups(
    settings: Mapping[str, Settings], parameters: Mapping[str, torch.nn.Parameter]
) -> list[dict[str, list[torch.nn.Parameter] | float]]:
    """One group for all parameters of equal settings, with the numbers that the scheduler reads."""
    members: dict[Settings, list[torch.nn.Parameter]] = {}
    for name, one in settings.items():
        members.setdefault(one, []).append(parameters[name])
    return [
        {
            "params": found,
            "max_lr": one.lr,
            "min_lr": one.min_lr,
            "start_wd": one.weight_decay,
            "end_wd": one.weight_decay,
        }
        for one, found in members.items()
    ]


def _made(spec: OptimizerSpec, groups: list[dict[str, list[torch.nn.Parameter] | float]]) -> torch.optim.Optimizer:
    if isinstance(spec, AdamWOptimizer):
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=0.0, fused=True)
    if isinstance(spec, SgdOptimizer):
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum)
    raise SpecError(
        f"`optimizer.kind` is {spec.kind}, which `policy.backend: fsdp` does not have; use adamw or sgd, or `policy.backend: megatron`"
    )


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """float32 norm of the gradients of which this rank has shards, over all ranks."""
    squares = torch.stack(torch._foreach_norm(list(gradients))).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
