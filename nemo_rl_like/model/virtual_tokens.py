"""Prompt tuning: virtual tokens before each row, whose embeddings alone are trained. Lester et al. 2021, arXiv 2104.08691.

A virtual token has an id behind the vocabulary, so that rows of any layout, caches and positions hold it as they hold others; only
the embedding knows better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.attention import PrefixedKeys
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.layouts import Passes
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.scratch import generator_of
from nemo_rl_like.model.weight_entries import EMBEDDING, VIRTUAL, Entry
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import PromptTuningSpec
from nemo_rl_like.tokens.batch import TokenBatch, with_further

PROMPT = "prompt_embeddings"
"""PEFT's name in files."""


class VirtualIds(nn.Module):
    """A model's virtual tokens: their ids, and what its embedding makes of them."""

    def __init__(self, vocabulary: int, count: int) -> None:
        """The `count` ids from `vocabulary` on."""
        super().__init__()
        self.first, self._count = vocabulary, count
        self.enabled = True

    @property
    def ids(self) -> tuple[int, ...]:
        """What stands before each row; nothing while they are off."""
        return tuple(range(self.first, self.first + self._count)) if self.enabled else ()

    def in_vocabulary(self, ids: Tensor) -> Tensor:
        """The ids with some real token in the place of virtual ones."""
        return torch.where(ids < self.first, ids, 0)

    def forward(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """Embeddings [s, b, H] (or this rank's [s / tp, b, H]) of ids [b, s], right at virtual tokens too, where that matters."""
        return embedded

    def call(self, ids: Tensor) -> PrefixedKeys | None:
        """What a pass over this rank's ids [b, s] shows every layer."""
        return None


class VirtualTokens(VirtualIds):
    """Virtual tokens with embeddings of their own, whole on every rank."""

    def __init__(self, start: Tensor, vocabulary: int, *, sequence_parallel: bool) -> None:
        """`start` [P, H] on the model's device."""
        super().__init__(vocabulary, len(start))
        self.weight = nn.Parameter(start)
        self._in_parts = sequence_parallel
        if sequence_parallel:  # each rank sees a part of the sequence, and Megatron sums the gradients
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """See `VirtualIds`."""
        own = ids.t()
        if self._in_parts and embedded.shape[0] < own.shape[0]:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            own = own.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        index = own - self.first
        return torch.where((index >= 0)[..., None], self.weight[index.clamp(min=0)], embedded)


def add_virtual_tokens(
    model: MegatronModel, config: ModelConfig, spec: PromptTuningSpec, weights: TensorReader, seed: int
) -> None:
    """Put virtual tokens on the model, which is frozen; they start as tokens of its vocabulary, drawn from `seed`.

    Raises InputError for a model that cannot have any.
    """
    check_prompt(config, spec)
    model.requires_grad_(False)
    drawn = torch.randint(config.vocab_size, (spec.tokens,), generator=generator_of(seed, PROMPT))
    start = weights.get(EMBEDDING)[drawn].to(runtime.device(), model.dtype)
    in_parts = bool(model.config.sequence_parallel)
    model.put_before_rows(VirtualTokens(start, config.vocab_size, sequence_parallel=in_parts))


def check_prompt(config: ModelConfig, spec: PromptTuningSpec) -> None:
    """Raise InputError for virtual tokens that leave no room, and for a model whose embeddings are not what its first layer reads."""
    check_room(config, spec.tokens)
    if config.traits.scaled_embeddings:
        raise InputError(
            f"policy.adapter is prompt_tuning, but a {config.family} model multiplies its embeddings, which PEFT does for virtual tokens in some "
            "families and not in others; use policy.lora"
        )


def check_room(config: ModelConfig, tokens: int) -> None:
    """Raise InputError for so many virtual tokens if no row fits behind them."""
    if tokens >= config.max_positions:
        raise InputError(
            f"policy.adapter.tokens is {tokens}, which leaves no room for a row in the model's context of {config.max_positions}; lower it"
        )


class PromptMap(WeightMap):
    """PEFT's name <-> the virtual tokens."""

    def __init__(self, config: ModelConfig, spec: PromptTuningSpec) -> None:
        entry = Entry("whole", (PROMPT,), ((spec.tokens, config.hidden_size),), (f"{VIRTUAL}weight",))
        super().__init__(config, (entry,))

    def owns(self, name: str) -> bool:
        """Whether a Megatron parameter belongs to this map."""
        return f".{VIRTUAL}" in name


def behind(batch: TokenBatch, ids: Sequence[int]) -> TokenBatch:
    """The rows with `ids` before each; without extras."""
    count, rows = len(ids), batch.rows
    starts = batch.cu_seqlens[:-1] + count * torch.arange(rows)
    virtual = (starts[:, None] + torch.arange(count)).flatten()
    longer = with_further(batch, _places(batch, count), virtual, torch.tensor(ids).repeat(rows), False)
    return replace(longer, prompt_lens=batch.prompt_lens + count)


def of_batch(passes: Passes, batch: TokenBatch, count: int) -> Passes:
    """Passes over `behind(batch, ids)` of `count` ids, whose scored tokens are told by their places in `batch`."""
    origin = torch.zeros(batch.tokens.numel() + batch.rows * count, dtype=torch.int64)
    origin[_places(batch, count)] = torch.arange(batch.tokens.numel())
    return replace(passes, mine=tuple(replace(one, source_index=origin[one.source_index]) for one in passes.mine))


def _places(batch: TokenBatch, count: int) -> Tensor:
    """int64 [N] where each token stands when `count` tokens stand before each row."""
    return torch.arange(batch.tokens.numel()) + count * (batch.row_of_token + 1)
