"""Linear layers on the CPU: Megatron's parameters and tensor-parallel sums, and matrices that every rank has whole.

A weight's gradient goes straight into the buffer that DDP keeps for it, so that it is written once and not added a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model.bare_function import Function
from nemo_rl_like.model.gradients import add_product, gradient_buffer
from nemo_rl_like.model.mcore import (
    ColumnParallelLinear,
    RowParallelLinear,
    TransformerConfig,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from nemo_rl_like.model.nf4 import Nf4Weight, values_of


class LocalColumnLinear(ColumnParallelLinear):
    """x W^T with this rank's rows of W; the gradient of x is summed over the tensor-parallel ranks. With sequence parallelism x is a part of
    the sequence, gathered here. An expert's x has been gathered before."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, in] (or [s / tp, b, in]) -> [s, b, out / tp]; the second value is the bias Megatron's linear may leave to its caller."""
        if self.is_expert:
            out = _Linear.call(input_, self.weight, None)
        elif self.sequence_parallel:
            out = _GatheredLinear.call(input_, self.weight, self.tp_group)
        else:
            out = _Linear.call(input_, self.weight, self.tp_group if self.tp_group.size() > 1 else None)
        return (out if self.bias is None else out + self.bias), None


class LocalRowLinear(RowParallelLinear):
    """x W^T with this rank's columns of W and its part of x, summed over the tensor-parallel ranks; with sequence parallelism each of them
    keeps a part of the sequence. An expert's are summed afterwards."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[s, b, in / tp] -> [s, b, out] (or [s / tp, b, out]); the second value is the bias Megatron's linear may leave to its caller."""
        out = _Linear.call(input_, self.weight, None)
        if self.is_expert:
            return out, None
        if self.sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif self.tp_group.size() > 1:
            out = reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return (out if self.bias is None else out + self.bias), None


class WholeLinear(torch.nn.Module):
    """x W^T with W whole on every tensor-parallel rank. The gradient of the result must be whole there too; with sequence parallelism x, the
    result and both gradients are those of this rank's part of the sequence."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters so marked over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in] -> [s, b, out]."""
        out: Tensor = _Linear.call(x, self.weight, None)
        return out


class Nf4ColumnLinear(LocalColumnLinear):
    """The same with a frozen matrix in NF4, whose values are there while they are multiplied with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _hold_in_nf4(self)


class Nf4RowLinear(LocalRowLinear):
    """The same with a frozen matrix in NF4."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _hold_in_nf4(self)


class Nf4WholeLinear(WholeLinear):
    """The same with a frozen matrix in NF4."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _hold_in_nf4(self)


def _hold_in_nf4(linear: torch.nn.Module) -> None:
    """Give its new weight, which nobody has written to yet, room for codes."""
    linear.weight = Nf4Weight(linear.get_parameter("weight"))


@dataclass(frozen=True, slots=True)
class Linears:
    """What a model's products are made of."""

    column: type[LocalColumnLinear] = LocalColumnLinear
    row: type[LocalRowLinear] = LocalRowLinear
    whole: type[WholeLinear] = WholeLinear


PLAIN = Linears()
IN_NF4 = Linears(Nf4ColumnLinear, Nf4RowLinear, Nf4WholeLinear)


class _Linear(Function):
    """x W^T. `group`: ranks over which the gradient of x is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)  # a frozen weight's gradient is never made
        ctx.group = group
        return x @ values_of(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        to_x = grad @ values_of(weight)
        summing = None if ctx.group is None else dist.all_reduce(to_x, group=ctx.group, async_op=True)
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = add_product(gradient_buffer(weight), grad.flatten(0, -2), x.flatten(0, -2))
        if summing is not None:
            summing.wait()
        return to_x, to_weight, None


class _GatheredLinear(Function):
    """x W^T of x gathered along the first axis; its gradient is summed and cut again. x is kept in part and gathered once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group = group
        return _gathered(x, group) @ values_of(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        whole = grad @ values_of(weight)
        to_x = whole.new_empty(whole.shape[0] // ctx.group.size(), *whole.shape[1:])
        summing = dist.reduce_scatter_tensor(to_x, whole.contiguous(), group=ctx.group, async_op=True)
        to_weight = None
        if ctx.needs_input_grad[1]:
            rows = _gathered(x, ctx.group).flatten(0, -2)
            to_weight = add_product(gradient_buffer(weight), grad.flatten(0, -2), rows)
        summing.wait()
        return to_x, to_weight, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole
