"""Prefix tuning: keys and values before each row, learned for every layer. Li and Liang 2021, arXiv 2101.00190.

Virtual tokens hold their places in rows, as in prompt tuning; in every layer the keys and values there are replaced by learned ones, so what
the model computes for the tokens themselves is read by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.decode import Decoder
from nemo_rl_like.model.forward import MegatronModel, whole_sequences
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.scratch import generator_of
from nemo_rl_like.model.virtual_tokens import VirtualIds, check_room
from nemo_rl_like.model.weight_entries import PREFIX, Entry
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import PrefixTuningSpec

_PARTS = ("keys", "values")


class Prefix(nn.Module):
    """One layer's keys, rotated, and values before each row: this rank's heads, [kv_heads * d, P] each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """[P, kv_heads, d] each, which they start as."""
        super().__init__()
        self._width = keys.shape[2]
        self.keys, self.values = (
            nn.Parameter(x.flatten(1).t().clone(memory_format=torch.contiguous_format)) for x in (keys, values)
        )

    def forward(self, key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, kv_heads, d] each with its own at the virtual tokens; `index` int64 [s, b] which one, below 0 elsewhere."""
        virtual, place = (index >= 0)[..., None, None], index.clamp(min=0)
        return torch.where(virtual, self._rows(self.keys)[place], key), torch.where(
            virtual, self._rows(self.values)[place], value
        )

    def _rows(self, whole: Tensor) -> Tensor:
        return whole.t().unflatten(1, (-1, self._width))


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """The prefixes of a rank's layers in one pass."""

    prefixes: Mapping[int, Prefix]
    """By layer number."""
    index: Tensor
    """int64 [s, b] which virtual token each of this rank's tokens is; below 0: none."""

    def replaced(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [s, b, kv_heads, d] of a layer, with its prefix."""
        return self.prefixes[layer](key, value, self.index)


class PrefixTokens(VirtualIds):
    """The virtual tokens of a model with prefixes."""

    def __init__(self, vocabulary: int, count: int, prefixes: Mapping[int, Prefix]) -> None:
        super().__init__(vocabulary, count)
        self._prefixes = dict(prefixes)

    def call(self, ids: Tensor) -> PrefixCall | None:
        """For this rank's ids [b, s] of a pass."""
        return PrefixCall(self._prefixes, ids.t() - self.first) if self.enabled else None


def add_prefixes(model: MegatronModel, config: ModelConfig, spec: PrefixTuningSpec, seed: int) -> None:
    """Put a prefix on every layer of the model, which is frozen. They start as the keys and values of tokens drawn from `seed`.

    Collective over the model's ranks. Raises InputError for a model that cannot have any.
    """
    check_prefix(config, spec)
    model.requires_grad_(False)
    drawn = torch.randint(config.vocab_size, (spec.tokens,), generator=generator_of(seed, PREFIX)).tolist()
    with whole_sequences(model):
        start = Decoder(model).keys_and_values(drawn)
    for layer in model.layers:
        layer.prefix = Prefix(*start[layer.layer_number])
    prefixes = {layer.layer_number: layer.prefix for layer in model.layers}
    model.put_before_rows(PrefixTokens(config.vocab_size, spec.tokens, prefixes))
    PrefixMap(config, spec).mark_shards(model)


def check_prefix(config: ModelConfig, spec: PrefixTuningSpec) -> None:
    """Raise InputError for prefixes that leave no room, and for a model whose keys and values they cannot be or that attends within a
    window, which would leave them behind."""
    check_room(config, spec.tokens)
    if config.latent is not None:
        raise InputError(
            f"policy.adapter is prefix_tuning, but a {config.family} model has latent attention, which makes keys and values of one narrow vector; "
            "use prompt_tuning"
        )
    if config.attention.window is not None:
        raise InputError(
            f"policy.adapter is prefix_tuning, but layers of this {config.family} model attend within {config.attention.window} tokens, which leaves "
            "prefixes behind; use policy.lora"
        )


class PrefixMap(WeightMap):
    """Names of files <-> this rank's prefixes."""

    def __init__(self, config: ModelConfig, spec: PrefixTuningSpec) -> None:
        shape = (config.kv_heads * config.head_dim, spec.tokens)
        super().__init__(
            config,
            tuple(
                Entry("rows", (f"{PREFIX}layers.{layer}.{part}",), (shape,), (f"{PREFIX}{part}",), layer)
                for layer in range(config.layers)
                for part in _PARTS
            ),
        )

    def owns(self, name: str) -> bool:
        """Whether a Megatron parameter belongs to this map."""
        return f".{PREFIX}" in name


def as_peft(tensors: Mapping[str, Tensor]) -> Tensor:
    """[P, layers * 2 * kv_heads * d]: the prefixes by their names in files, as PEFT's one tensor."""
    layers = len(tensors) // len(_PARTS)
    named = (f"{PREFIX}layers.{layer}.{part}" for layer in range(layers) for part in _PARTS)
    return torch.cat([tensors[name] for name in named]).t().contiguous()
