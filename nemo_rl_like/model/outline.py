"""What stages and engines ask of a model whose layers they do not build: its size, context and vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import AutoConfig

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig


class Outline(Protocol):
    """A causal language model from outside; `ModelConfig` is one, with all that Megatron's layers need beside."""

    @property
    def family(self) -> str:
        """`model_type` of its config.json."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens with an embedding."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, in channels."""
        ...

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        ...

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest context, in tokens."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """The output head is the input embedding."""
        ...

    def to_hf_dict(self) -> dict[str, object]:
        """A config.json by which two models of one shape are known."""
        ...

    def require_logits(self, source: str) -> None:
        """Raise InputError, which starts with `source`, unless the model ends in logits."""
        ...


@dataclass(frozen=True, slots=True)
class TransformersOutline:
    """A model of an architecture that transformers knows and Megatron's weight map does not."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    max_positions: int
    tie_embeddings: bool
    raw: str
    """Its config.json, without what says nothing about its shape."""

    def to_hf_dict(self) -> dict[str, object]:
        """See `Outline`."""
        found: dict[str, object] = json.loads(self.raw)
        return found

    def require_logits(self, source: str) -> None:
        """See `Outline`."""
        named = self.to_hf_dict().get("architectures")
        if (
            isinstance(named, list)
            and named
            and not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in named)
        ):
            raise InputError(f"{source}: config.json's architectures are {named}; use a causal language model")


_SHAPELESS = ("torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache")
"""Keys of a config.json that differ between copies of one model."""


def outline_of(folder: Path) -> Outline:
    """The outline of a Hugging Face folder of any architecture. Raises InputError if transformers cannot read it either."""
    try:
        return ModelConfig.from_hf_folder(folder)
    except InputError as error:
        return _of_transformers(folder, error)


def _of_transformers(folder: Path, refused: InputError) -> TransformersOutline:
    """Raises `refused` where there is no config.json, and InputError naming what transformers' configuration lacks."""
    file = folder / "config.json"
    if not file.is_file():
        raise refused
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise InputError(f"{file}: transformers cannot read it: {error}") from error
    known = {**config.to_dict(), **{name: getattr(config, name, None) for name in _SIZES}}
    sizes = {name: known[name] for name in _SIZES}
    lost = [name for name, value in sizes.items() if not isinstance(value, int)]
    if lost:
        raise InputError(
            f"{file}: {', '.join(lost)} is not given; only causal language models of one text decoder are supported"
        )
    raw = {k: v for k, v in json.loads(file.read_text(encoding="utf-8")).items() if k not in _SHAPELESS}
    vocab_size, hidden_size, layers, heads, max_positions = (int(value) for value in sizes.values())
    return TransformersOutline(
        str(config.model_type),
        vocab_size,
        hidden_size,
        layers,
        heads,
        max_positions,
        bool(known.get("tie_word_embeddings", False)),
        json.dumps(raw),
    )


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
