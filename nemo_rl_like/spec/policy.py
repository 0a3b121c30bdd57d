"""The policy block: layout, rows and precision of the trainable model."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from nemo_rl_like.spec.base import Spec


class LayoutSpec(Spec):
    """How the model is split over ranks; world size = dp * pp * tp."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel stages."""
    dp: PositiveInt = 1
    """Data-parallel ranks."""


class Fp8Spec(Spec):
    """Linear layers computed in FP8 by Transformer Engine; weights, attention and the head stay in the model's type."""

    recipe: Literal["tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """How values are scaled: one factor a tensor, one a block of 128, or one a block of 32 (Blackwell GPUs)."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """`hybrid`: E4M3 forward and E5M2 gradients; `e4m3` for both."""
    first_bf16_layers: NonNegativeInt = 0
    """Layers at the start that stay in bfloat16."""
    last_bf16_layers: NonNegativeInt = 0
    """Layers at the end that stay in bfloat16."""


class PolicySpec(Spec):
    """The trainable model as a service."""

    layout: LayoutSpec = LayoutSpec()
    """Parallel layout."""
    rows: Literal["shared_prefix", "packed", "padded"] = "shared_prefix"
    """How rows share a forward pass: one prompt for its samples, laid end to end, or padded."""
    micro_batch_tokens: PositiveInt = 16384
    """Token budget of one forward-backward pass on one rank, in tokens; one longer row still makes a pass of its own."""
    fp8: Fp8Spec | None = None
    """Compute linear layers in FP8 (an NVIDIA GPU of the Hopper generation or newer, `model.dtype: bfloat16`); default: off."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose vocabulary-sized logits exist at once, in tokens."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of one rank; 0 = all cores divided by ranks."""
