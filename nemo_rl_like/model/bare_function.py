"""Autograd functions that cost their forward alone where gradients are off."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class NoContext:
    """Stands for autograd's context where there is nothing to save."""

    group: dist.ProcessGroup | None

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Forget the tensors."""


class Function(torch.autograd.Function):
    """A function that costs its forward alone where gradients are off; `apply` adds 10 us, eight times a layer and decoded token."""

    @classmethod
    def call(cls, *inputs: object) -> Any:
        """`apply`, or the bare forward."""
        return cls.apply(*inputs) if torch.is_grad_enabled() else cls.forward(NoContext(), *inputs)
