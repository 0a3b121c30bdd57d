"""The policy block: layout, rows and precision of the trainable model."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec


class LayoutSpec(Spec):
    """How the model is split over ranks; world size = dp * pp * tp."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel stages."""
    dp: PositiveInt = 1
    """Data-parallel ranks."""
    sp: bool = False
    """Sequence parallelism: each of the `tp` ranks keeps a part of the sequence between its linear layers, so that residuals and norms take
    1 / tp of the memory."""

    @model_validator(mode="after")
    def _has_ranks_to_share(self) -> LayoutSpec:
        if self.sp and self.tp == 1:
            raise ValueError(
                "`sp` shares sequences among the tensor-parallel ranks, and `tp` is 1; leave it out, or raise `tp`"
            )
        return self


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


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraSpec(Spec):
    """Low-rank adapters: the model stays as it is, and only W + scale B A changes (Hu et al. 2021, arXiv 2106.09685)."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The product B A is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that large ranks learn as fast (Kalajdzievski 2023, arXiv 2312.03732)."""
    targets: Annotated[tuple[Projection, ...], Field(min_length=1)] = get_args(Projection)
    """Projections that have an adapter, in every layer."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


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
    lora: LoraSpec | None = None
    """Train adapters instead of the whole model; default: off."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose vocabulary-sized logits exist at once, in tokens."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of one rank; 0 = all cores divided by ranks."""
