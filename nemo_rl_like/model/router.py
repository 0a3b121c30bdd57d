"""The router of experts: Megatron's choice, balanced by losses of each row, and counted.

Both losses are means over the rows of a step, so they do not depend on how rows share passes and ranks. With s the softmax of a token's
router logits over the E experts, k the experts that a token passes, and T the tokens of a row:

- balance: sum over e of f_e P_e, f_e = E / (k T) times the tokens that chose e, P_e = the mean of s_e (DeepSeek-V3, arXiv 2412.19437,
  eq. 17 to 20, with the softmax in the place of their normalised sigmoid);
- z: the mean of (log sum exp of the logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5).

Each layer adds its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model.context import ContextRanks
from nemo_rl_like.model.mcore import TopKRouter, TransformerConfig, parallel_state
from nemo_rl_like.model.row_places import RowPairs, RowPlaces
from nemo_rl_like.spec.policy import RouterSpec

ROUTER_METRICS = ("experts/max_load", "experts/min_load", "experts/balance_loss")
"""Largest and smallest share of a layer's choices that fell on one expert, over all layers, times the number of experts (1: all alike); and
the balance loss, without its coefficient, as the mean over layers."""


class RowRouter(TopKRouter):
    """Megatron's router, whose choice a `RouterWatch` sees and balances."""

    watch: RouterWatch | None = None
    layer: int = 0
    """Global index."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [s, b, E] -> weights [s * b, E], 0 where not chosen, and bool [s * b, E] chosen."""
        weights, chosen = super().routing(logits, padding_mask)
        if self.watch is not None:
            weights = self.watch.balanced(self.layer, logits.flatten(0, 1), weights, chosen)
        return weights, chosen


class RouterWatch:
    """What the routers of one rank share: the rows of the pass, what the losses weigh, and what each expert got."""

    rows: RowPairs | None = None
    """Of the pass that the next router belongs to."""

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config
        self._losses = RouterSpec()
        self._row_weight, self._scale = 0.0, 0.0
        self._chosen, self._balance = torch.zeros(0), torch.zeros(())

    @contextmanager
    def step(self, losses: RouterSpec, row_weight: float, scale: float, device: torch.device) -> Iterator[None]:
        """Inside the block a pass adds `scale` times the losses, of which each row has the share `row_weight`; counts start anew."""
        self._losses, self._row_weight, self._scale = losses, row_weight, scale
        self._chosen = torch.zeros(self._config.num_layers, self._config.num_moe_experts, device=device)
        self._balance = torch.zeros((), device=device)
        try:
            yield
        finally:
            self.rows = None

    def pairs(
        self, row_places: RowPlaces | None, shape: torch.Size, padded: int, context: ContextRanks | None
    ) -> RowPairs | None:
        """The rows of a pass of `shape` [b, s], as an `AttentionCall` takes them; None where nothing is balanced."""
        if row_places is None:
            return None
        parts, part = (1, 0) if context is None else (context.size, context.group.rank())
        if self._config.sequence_parallel:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            parts, part = parts * ranks, part * ranks + parallel_state.get_tensor_model_parallel_rank()
        return row_places.on_rank(shape, padded, parts, part)

    def balanced(self, layer: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The router's `weights` [n, E], whose gradient has that of the losses behind it."""
        rows = self.rows
        if rows is None or not torch.is_grad_enabled():
            return weights
        with torch.set_grad_enabled(self._losses != RouterSpec()):
            loss = self._loss(layer, rows, logits.float(), chosen)
        if not loss.requires_grad:
            return weights
        with_loss: Tensor = _WithLoss.apply(weights, self._scale * loss)
        return with_loss

    def _loss(self, layer: int, rows: RowPairs, logits: Tensor, chosen: Tensor) -> Tensor:
        """This rank's part of the pass's losses; counts the choices."""
        picked = rows.sums(chosen.float())
        self._chosen[layer] += picked.sum(0)
        if rows.in_parts:
            dist.all_reduce(picked, group=parallel_state.get_tensor_and_context_parallel_group())
        fraction = picked * (logits.shape[1] / self._config.moe_router_topk) / rows.lengths
        balance = (fraction * rows.sums(logits.softmax(-1)) / rows.lengths).sum() * self._row_weight
        self._balance += balance.detach()
        loss = self._losses.balance_loss * balance
        if self._losses.z_loss:
            square = logits.logsumexp(-1, keepdim=True).square()
            loss = loss + self._losses.z_loss * self._row_weight * (rows.sums(square) / rows.lengths).sum()
        return loss

    def metrics(self) -> Tensor:
        """`ROUTER_METRICS` float32 [3] of the last step, on every rank: one all-reduce."""
        found = torch.cat([self._chosen.flatten(), self._balance[None]])
        dist.all_reduce(found)
        load = found[:-1].view_as(self._chosen)
        share = load * load.shape[1] / load.sum(1, keepdim=True).clamp(min=1.0)
        return torch.stack([share.max(), share.min(), found[-1] / load.shape[0]])


class _WithLoss(torch.autograd.Function):
    """The first input, which hands the second one, a loss, a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())
