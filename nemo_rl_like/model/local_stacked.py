"""Experts on the CPU whose matrices lie in one tensor of each kind, as GPT-OSS's files have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl_like.model.hf_experts import ClampedSwiGlu
from nemo_rl_like.model.lora_stacked import STACKED, LowRank, StackedAdapter
from nemo_rl_like.model.mcore import MegatronModule, ProcessGroupCollection, TransformerConfig


class StackedExperts(MegatronModule):
    """This rank's experts of one layer, one after the other; columns of `gate_up` are a gate, its up, the next gate, .."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        swiglu: ClampedSwiGlu,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        hidden, width, dtype = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype
        self._swiglu = swiglu
        self.lora: StackedAdapter | None = None
        self.gate_up = torch.nn.Parameter(torch.empty(num_local_experts, hidden, 2 * width, dtype=dtype))
        self.gate_up_bias = torch.nn.Parameter(torch.empty(num_local_experts, 2 * width, dtype=dtype))
        self.down = torch.nn.Parameter(torch.empty(num_local_experts, width, hidden, dtype=dtype))
        self.down_bias = torch.nn.Parameter(torch.empty(num_local_experts, hidden, dtype=dtype))

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Tokens [n, H] sorted by expert, how many each has, and their weights [n] -> [n, H]; the second value is a bias."""
        counts = tokens_per_expert.tolist()
        # `unbind` has one backward for all experts; an index would make a gradient of the whole tensor for each.
        matrices = zip(*(x.unbind() for x in (self.gate_up, self.gate_up_bias, self.down, self.down_bias)), strict=True)
        added = zip(*(self._adapters(name, len(counts)) for name in STACKED), strict=True)
        parts = zip(tokens.split(counts), weights.split(counts), matrices, added, strict=True)
        return torch.cat([self._expert(part, weight, *own, *low) for part, weight, own, low in parts]), None

    def _expert(
        self,
        x: Tensor,
        weight: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        to_gate_up: LowRank | None,
        to_down: LowRank | None,
    ) -> Tensor:
        """One expert of its tokens [n, H], times their weights [n]."""
        inner = clamped_swiglu(self._product(x, gate_up, gate_up_bias, to_gate_up), self._swiglu)
        out = self._product(inner, down, down_bias, to_down)
        return (out * weight[:, None]).to(out.dtype)

    def _adapters(self, name: str, count: int) -> Sequence[LowRank | None]:
        return [None] * count if self.lora is None else self.lora.of_experts(name, count)

    def _product(self, x: Tensor, matrix: Tensor, bias: Tensor, added: LowRank | None) -> Tensor:
        out = x @ matrix + bias
        if added is None or self.lora is None:
            return out
        a, b = added
        return out + (x @ a.t() @ b.t()) * self.lora.scale


def clamped_swiglu(both: Tensor, swiglu: ClampedSwiGlu) -> Tensor:
    """[n, 2 width] of alternating gates and ups -> [n, width]; see `ClampedSwiGlu`."""
    gate = both[..., ::2].clamp(max=swiglu.limit)
    up = both[..., 1::2].clamp(-swiglu.limit, swiglu.limit)
    return gate * (swiglu.alpha * gate).sigmoid() * (up + 1)
