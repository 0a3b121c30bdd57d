"""Multi-head latent attention on the CPU (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2 and 2.1.3, eq. 9 to 19).

Queries and keys of a head are [plain, turned by positions]; the turned part of keys is one for all heads. Keys and values are made whole for
every head, and values padded to the width of keys, so that every layout attends and caches them as it does with any others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.attention import AttentionCall, Rotary, call_of, rotate
from nemo_rl_like.model.hf_attention import PLAIN, Scores
from nemo_rl_like.model.hf_latent import LatentConfig
from nemo_rl_like.model.local_linears import Linears
from nemo_rl_like.model.local_norms import RmsNorm
from nemo_rl_like.model.mcore import (
    MegatronModule,
    ProcessGroupCollection,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

_NORM_EPS = 1e-6
"""Epsilon of the norms of the narrow vectors, whatever the other norms have, as in transformers."""


class LatentSelfAttention(MegatronModule):
    """Makes a token's narrow vectors, from them its queries, keys and values, and lets the micro-batch's layout attend.

    Tensor-parallel ranks have the matrices into the narrow vectors whole, and some heads of the others.
    """

    scores: Scores = PLAIN
    """Of this layer; the model sets it."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        latent: LatentConfig,
        made_of: Linears,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self._latent, self._group = layer_number, latent, pg_collection.tp
        self._heads = config.num_attention_heads // self._group.size()
        self.sequence_parallel = config.sequence_parallel
        selective = config.recompute_granularity == "selective"
        self.checkpoint_core_attention = selective and "core_attn" in config.recompute_modules
        shared: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        shared |= {"skip_bias_add": True, "tp_group": self._group}
        column = partial(made_of.column, gather_output=False, **shared)
        matrices = latent.projections(config.hidden_size, config.num_attention_heads)
        queries, keys = matrices["q_proj" if latent.query_rank is None else "q_b_proj"], matrices["kv_b_proj"]
        if latent.query_rank is None:
            self.linear_q_proj = column(*reversed(queries))
        else:
            self.linear_q_down_proj = made_of.whole(config, config.hidden_size, latent.query_rank)
            self.q_layernorm = RmsNorm(config, latent.query_rank, _NORM_EPS)
            self.linear_q_up_proj = column(*reversed(queries))
        self.linear_kv_down_proj = made_of.whole(config, config.hidden_size, matrices["kv_a_proj_with_mqa"][0])
        self.kv_layernorm = RmsNorm(config, latent.key_value_rank, _NORM_EPS)
        self.linear_kv_up_proj = column(*reversed(keys))
        self.linear_proj = made_of.row(*reversed(matrices["o_proj"]), input_is_parallel=True, **shared)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: AttentionCall | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """[s, b, H] -> [s, b, H]; the second value is the bias Megatron's attention may return."""
        call = call_of(packed_seq_params, attention_mask)
        rotary = call.rotary_for(self.scores)
        query = self._queries(hidden_states, rotary)
        key, value = self._keys_and_values(hidden_states, rotary)
        again = self.checkpoint_core_attention
        attended = call.attend_in(self.layer_number, self.scores, query, key, value, recompute=again)
        values = attended.unflatten(-1, (self._heads, -1))[..., : self._latent.value_width]
        out: Tensor = self.linear_proj(values.flatten(2))[0]
        return out, None

    def _queries(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """[s, b, heads, plain + rotary width], turned."""
        if self._latent.query_rank is None:
            query = self.linear_q_proj(hidden)[0]
        else:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))[0]
        plain, turning = query.unflatten(-1, (self._heads, -1)).split(
            [self._latent.plain_width, self._latent.rotary_width], dim=-1
        )
        return torch.cat([plain, self._turned(turning, rotary)], dim=-1)

    def _keys_and_values(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[s, b, heads, plain + rotary width] twice; values are padded with zeros."""
        latent = self._latent
        narrow, turning = self.linear_kv_down_proj(hidden).split([latent.key_value_rank, latent.rotary_width], dim=-1)
        both = self.linear_kv_up_proj(self.kv_layernorm(narrow))[0].unflatten(-1, (self._heads, -1))
        plain, value = both.split([latent.plain_width, latent.value_width], dim=-1)
        turned = self._turned(self._for_all_heads(turning)[:, :, None], rotary).expand(-1, -1, self._heads, -1)
        return torch.cat([plain, turned], dim=-1), functional.pad(value, (0, latent.head_dim - latent.value_width))

    def _for_all_heads(self, x: Tensor) -> Tensor:
        """[s, b, width] of whole sequences, whose gradient is summed over the ranks that have some heads each."""
        if self.sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(x, group=self._group)
            return whole
        return x if self._group.size() == 1 else copy_to_tensor_model_parallel_region(x, group=self._group)

    def _turned(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[s, b, heads, rotary width], its pairs put half of it apart."""
        if self._latent.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x, rotary)
