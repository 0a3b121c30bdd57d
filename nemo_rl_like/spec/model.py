"""The model block: a Hugging Face folder, or a model made from scratch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec

DType = Literal["float32", "bfloat16"]
Stretch = Annotated[float, Field(ge=1)]


class LinearRope(Spec):
    """Every position counts 1 / factor (Chen et al. 2023, arXiv 2306.15595)."""

    kind: Literal["linear"] = "linear"
    """Stretching."""
    factor: Stretch
    """New context / trained context."""


class Llama3Rope(Spec):
    """Long waves are stretched, short ones stay (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    """Stretching."""
    factor: Stretch
    """By how much the long waves are stretched."""
    low_freq_factor: PositiveFloat = 1.0
    """Waves that fit less often into the trained context are stretched by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """Waves that fit more often into it stay."""
    original_positions: PositiveInt
    """Trained context, in tokens."""

    @model_validator(mode="after")
    def _in_order(self) -> Llama3Rope:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"`low_freq_factor` is {self.low_freq_factor}, must be below `high_freq_factor` ({self.high_freq_factor})"
            )
        return self


class YarnRope(Spec):
    """Long waves are stretched, short ones stay, and attention is sharpened (YaRN, Peng et al. 2023, arXiv 2309.00071)."""

    kind: Literal["yarn"] = "yarn"
    """Stretching."""
    factor: Stretch
    """New context / trained context."""
    original_positions: PositiveInt
    """Trained context, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Waves that fit more often into the trained context stay."""
    beta_slow: PositiveFloat = 1.0
    """Waves that fit less often into it are stretched by the whole factor."""
    attention_factor: PositiveFloat | None = None
    """Factor of cosines and sines; default: 0.1 ln(factor) + 1, or with the two scales below the quotient of 0.1 scale ln(factor) + 1 of both."""
    mscale: PositiveFloat | None = None
    """The upper of the two (DeepSeek-V2, arXiv 2405.04434)."""
    mscale_all_dim: PositiveFloat | None = None
    """The lower of the two. In models with latent attention, scores are multiplied by the square of 0.1 scale ln(factor) + 1."""
    truncate: bool = True
    """Round the bounds of the ramp between the two to whole pairs of channels."""


class LongRope(Spec):
    """Every pair of channels is stretched by a factor of its own (LongRoPE, Ding et al. 2024, arXiv 2402.13753; Phi-3-128k, Phi-4-mini)."""

    kind: Literal["longrope"] = "longrope"
    """Stretching."""
    original_positions: PositiveInt
    """Trained context, in tokens."""
    short_factor: tuple[PositiveFloat, ...]
    """What each pair's wavelength is multiplied by in a model whose `max_positions` is at most that."""
    long_factor: tuple[PositiveFloat, ...]
    """The same where `max_positions` is more, in rows of any length."""
    attention_factor: PositiveFloat | None = None
    """Factor of cosines and sines; default: sqrt(1 + ln(s) / ln(original_positions)), s = max_positions / original_positions, 1 where s is at
    most 1."""

    @model_validator(mode="after")
    def _as_many(self) -> LongRope:
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"`short_factor` has {len(self.short_factor)} numbers and `long_factor` {len(self.long_factor)}; both need one for each "
                "pair of channels that positions turn"
            )
        return self


RopeScalingSpec = Annotated[LinearRope | Llama3Rope | YarnRope | LongRope, Field(discriminator="kind")]


class ModelInitSpec(Spec):
    """A model made from scratch."""

    family: Literal["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"] = "llama"
    """Architecture family."""
    hidden_size: PositiveInt = 192
    """Width of the residual stream, in channels."""
    intermediate_size: PositiveInt = 512
    """Width of the feed-forward layer, in channels; of one expert's with `experts`."""
    experts: PositiveInt | None = None
    """Experts of every layer, in families that have some; each token passes `experts_per_token` of them."""
    experts_per_token: Annotated[int, Field(ge=2)] = 2
    """Experts that a token passes; their weights sum to 1."""
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

    @model_validator(mode="after")
    def _experts_fit(self) -> ModelInitSpec:
        mixture = self.family in ("mixtral", "qwen3_moe")
        if mixture and self.experts is None:
            raise ValueError(f"a {self.family} model needs `experts`; give their number, or choose a dense `family`")
        if not mixture and self.experts is not None:
            raise ValueError(
                f"a {self.family} model has no `experts`; leave it out, or use `family` mixtral or qwen3_moe"
            )
        if self.experts is not None and self.experts_per_token > self.experts:
            raise ValueError(f"`experts_per_token` is {self.experts_per_token}, more than the {self.experts} `experts`")
        return self


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
    adapter: str | None = None
    """PEFT folder (adapter_config.json, adapter_model.safetensors) of LoRA adapters over `path`: the model is `path` with them merged, tensor by
    tensor as its weights are read; default: `path` alone."""
    init: ModelInitSpec | None = None
    """Make the model from scratch instead of reading `path`."""
    tokenizer: TokenizerSpec | None = None
    """Tokenizer; default: the one in `path`."""
    rope_scaling: RopeScalingSpec | None = None
    """Stretch rotary positions to a longer context; default: as the model's config.json says."""
    max_positions: PositiveInt | None = None
    """Longest context with `rope_scaling`, in tokens; default: the model's trained context times the factor."""
    dtype: DType = "float32"
    """Parameter and activation type."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of `path` and `init`")
        if self.adapter is not None and self.path is None:
            raise ValueError("`adapter` is merged into the model of `path`; give `path`, or leave it out")
        if self.max_positions is not None and self.rope_scaling is None:
            raise ValueError(
                "`max_positions` goes with `rope_scaling`; give both, or leave it out (`init` has its own)"
            )
        if self.init is not None and self.tokenizer is None:
            raise ValueError("a model from scratch (`init`) needs `tokenizer`")
        return self
