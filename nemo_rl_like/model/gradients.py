"""Weight gradients that are written straight into the buffer Megatron's DDP keeps for the weight."""

from __future__ import annotations

from torch import Tensor


def gradient_buffer(weight: Tensor) -> Tensor | None:
    """DDP's buffer for the gradient of `weight`, of its shape, float32; None while no DDP holds it.

    What is added to it must not be returned to autograd as well: DDP adds what autograd finds.
    """
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    return buffer


def add_product(buffer: Tensor | None, left: Tensor, right: Tensor) -> Tensor | None:
    """left^T right for [tokens, out] and [tokens, in]: added to `buffer` (returns None), or returned where there is none."""
    if buffer is None:
        return left.t() @ right
    if buffer.dtype == left.dtype:
        buffer.addmm_(left.t(), right)
    else:
        buffer.add_(left.t() @ right)
    return None
