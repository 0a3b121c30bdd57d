"""Norms on the CPU, computed in float32, with the signature that Megatron's specs build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.bare_function import Function
from nemo_rl_like.model.families.family import Norm
from nemo_rl_like.model.mcore import TransformerConfig


class RmsNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019), or times 1 + weight where Megatron's config centres weights on zero."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.from_one = eps, config.layernorm_zero_centered_gamma
        self.weight = _parameter(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        out: Tensor = _RmsNorm.call(x, _factor(self.weight, self.from_one), self.eps)
        return out


class LayerNorm1p(torch.nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * (1 + weight) + bias (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = (_parameter(config, hidden_size) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        factor = _factor(self.weight, from_one=True)
        out = functional.layer_norm(x.float(), self.weight.shape, factor, self.bias.float(), self.eps)
        return out.to(x.dtype)


NORMS: Mapping[Norm, type[torch.nn.Module]] = {"rms": RmsNorm, "rms_1p": RmsNorm, "layer_1p": LayerNorm1p}


def _parameter(config: TransformerConfig, width: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))
    # Megatron sums the gradients of parameters so marked over the tensor-parallel ranks.
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def _factor(weight: Tensor, from_one: bool) -> Tensor:
    """What the normed values are multiplied by."""
    return 1 + weight.float() if from_one else weight


class _RmsNorm(Function):
    """With r = 1 / sqrt(mean(x^2) + eps): y = x r w, dx = r (g w - x r^2 mean(g w x)), dw = sum over rows of g x r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        wide, upper, factor = x.float().reshape(-1, width), grad.float().reshape(-1, width), weight.float()
        rows = scale.reshape(-1, 1)
        product = upper * wide
        to_weight = torch.mv(product.t(), rows[:, 0])
        along = torch.mv(product, factor)[:, None].mul_(rows.pow(3)).div_(width)
        to_x = torch.mul(upper, factor, out=product).mul_(rows).addcmul_(wide, along, value=-1)
        return to_x.view(x.shape).to(x.dtype), to_weight.to(weight.dtype), None
