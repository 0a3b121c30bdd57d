"""What feed-forward layers on the CPU do between their two products, each with a backward of its own that saves its input only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.bare_function import Function


class SwiGlu(Function):
    """[gate, up] along the last axis -> silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        out = torch.empty_like(both)
        to_gate, to_up = out.chunk(2, dim=-1)
        torch.mul(grad, up, out=to_gate)
        torch.ops.aten.silu_backward.grad_input(to_gate, gate, grad_input=to_gate)
        torch.ops.aten.silu.out(gate, out=to_up)
        to_up.mul_(grad)
        return out


class GeGlu(Function):
    """[gate, up] along the last axis -> gelu(gate) * up, with the tanh form of GELU (Shazeer 2020, arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        to_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        to_up = functional.gelu(gate, approximate="tanh").mul_(grad)
        return torch.cat([to_gate, to_up], dim=-1)


class SquaredRelu(Function):
    """max(x, 0)^2 (So et al. 2021, arXiv 2109.08668)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return functional.relu(x).mul_(2).mul_(grad)
