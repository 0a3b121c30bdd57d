"""Weights that are kept in FP8 alone (`policy.fp8.parameters`): filled from the model's type, and read in it.

Written after Megatron's and Transformer Engine's source; none of it has been run, since such a weight exists on a GPU only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_rl_like.model.mcore import dequantize_fp8_tensor, is_float8tensor
from nemo_rl_like.model.nf4 import values_of


def plain(weight: Tensor) -> Tensor:
    """The weight, or the values of one that is kept in FP8 or NF4, in the model's type."""
    if not is_float8tensor(weight):
        return values_of(weight)
    values: Tensor = dequantize_fp8_tensor(weight.detach())
    return values


def fill(weight: torch.nn.Parameter, values: Tensor) -> None:
    """Give the weight these values.

    Of one that is kept in FP8 the optimizer, when it is built, takes its master copy from what the layer was made with, kept on the host;
    so the values, not yet rounded, take that place. Once it has been taken, nothing is kept.
    """
    weight.copy_(values)
    if not is_float8tensor(weight):
        return
    made: Any = weight  # Transformer Engine puts both names on the parameter itself
    if made.get_high_precision_init_val() is not None:
        made._high_precision_init_val = values.detach().to("cpu", weight.dtype)
