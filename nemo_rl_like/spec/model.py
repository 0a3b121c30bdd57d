"""The model block: a Hugging Face folder, or a model made from scratch."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec

DType = Literal["float32", "bfloat16"]


class ModelInitSpec(Spec):
    """A model made from scratch."""

    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    """Architecture family."""
    hidden_size: PositiveInt = 192
    """Width of the residual stream, in channels."""
    intermediate_size: PositiveInt = 512
    """Width of the feed-forward layer, in channels."""
    layers: PositiveInt = 5
    """Number of decoder layers."""
    heads: PositiveInt = 6
    """Number of query heads."""
    kv_heads: PositiveInt = 6
    """Number of key/value heads; must divide `heads`."""
    head_dim: PositiveInt = 32
    """Width of one head, in channels."""
    max_positions: PositiveInt = 256
    """Longest context, in tokens."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    tie_embeddings: bool = True
    """Share the input embedding and the output head."""


class TokenizerSpec(Spec):
    """Where the tokenizer comes from, when it is not the model folder's own."""

    path: str | None = None
    """Folder with a Hugging Face tokenizer."""
    characters: str | None = None
    """Make a character tokenizer over this alphabet (with pad, begin and end tokens and a plain chat template)."""

    @model_validator(mode="after")
    def _one_source(self) -> TokenizerSpec:
        if (self.path is None) == (self.characters is None):
            raise ValueError("give exactly one of `path` and `characters`")
        return self


class ModelSpec(Spec):
    """The policy's model: a Hugging Face folder or one made from scratch."""

    path: str | None = None
    """Hugging Face folder (config.json, safetensors, tokenizer)."""
    init: ModelInitSpec | None = None
    """Make the model from scratch instead of reading `path`."""
    tokenizer: TokenizerSpec | None = None
    """Tokenizer; default: the one in `path`."""
    dtype: DType = "float32"
    """Parameter and activation type."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of `path` and `init`")
        if self.init is not None and self.tokenizer is None:
            raise ValueError("a model from scratch (`init`) needs `tokenizer`")
        return self
