"""The router of experts: its choice, balanced by losses of each row or by biases, and counted.

Both losses are means over the rows of a step, so they do not depend on how rows share passes and ranks. With s the softmax of a token's
router logits over the E experts (or their sigmoids, made to sum to 1), k the experts that a token passes, and T the tokens of a row:

- balance: sum over e of f_e P_e, f_e = E / (k T) times the tokens that chose e, P_e = the mean of s_e (DeepSeek-V3, arXiv 2412.19437,
  eq. 17 to 20);
- z: the mean of (log sum exp of the logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5).

Each layer adds its own.

A bias of each expert may count in the choice and not in the weights. After a step it moves up by a fixed rate where the expert got fewer
tokens of the step than the mean, and down where it got more (Wang et al. 2024, arXiv 2408.15664, algorithm 1). A row's tokens count for
each row, so that the bias does not depend on how rows share passes either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model.context import ContextRanks
from nemo_rl_like.model.families import ExpertNames
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_experts import ExpertsConfig
from nemo_rl_like.model.mcore import TopKRouter, TransformerConfig, parallel_state
from nemo_rl_like.model.routes import Routes
from nemo_rl_like.model.row_places import RowPairs, RowPlaces
from nemo_rl_like.spec.policy import RouterSpec

ROUTER_METRICS = ("experts/max_load", "experts/min_load", "experts/balance_loss")
"""Largest and smallest share of a layer's choices that fell on one expert, over all layers, times the number of experts (1: all alike); and
the balance loss, without its coefficient, as the mean over layers."""

ENGINE_DIFFERS = "experts/engine_differs"
"""Share of the tokens that an engine sent to other experts, in some layer, than the trainer's routers choose at the same pass."""


class RowRouter(TopKRouter):
    """Megatron's router, whose choice a `RouterWatch` sees and balances; what Megatron has no choice for, or is replayed, it chooses itself."""

    def __init__(self, config: TransformerConfig, **groups: Any) -> None:
        super().__init__(config, **groups)
        self.watch: RouterWatch | None = None
        self.layer = 0
        """Index among the layers with experts, over the whole model."""
        self.score_bias: torch.nn.Parameter | None = None
        """float32 [E]; None: there is none."""
        self._choice: Choice | None = None
        self._as_megatron = True

    def join(self, watch: RouterWatch, layer: int, experts: ExpertsConfig, names: ExpertNames) -> None:
        """Choose as these experts are chosen, seen by `watch`."""
        self.watch, self.layer = watch, layer
        if names.bias:
            self.score_bias = torch.nn.Parameter(torch.zeros(experts.count), requires_grad=False)
        self._choice = Choice(experts, names)
        self._as_megatron = names.score == "softmax" and experts.groups == 1 and experts.scale == 1

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [s, b, E] -> weights [s * b, E], 0 where not chosen, and bool [s * b, E] chosen."""
        flat = logits.flatten(0, 1)
        watch, choice = self.watch, self._choice
        if watch is None or choice is None:
            raise ValueError("a router needs to `join` a watch first")
        if self._as_megatron and not watch.routes.busy:
            weights, chosen = super().routing(logits, padding_mask)
        else:
            index = watch.routes.choose(self.layer, watch.rows, choice.index(flat, self.score_bias))
            weights, chosen = choice.weights(flat, index)
        return watch.balanced(self.layer, flat, weights, chosen), chosen


@dataclass(frozen=True, slots=True)
class Choice:
    """How a token gets to its experts (DeepSeek-V2, arXiv 2405.04434, sec. 2.2; DeepSeek-V3, arXiv 2412.19437, eq. 12 to 16)."""

    experts: ExpertsConfig
    names: ExpertNames

    @torch.no_grad()
    def index(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Logits [n, E] and bias [E] -> int64 [n, k] the chosen experts."""
        ranked = logits if self.names.score == "softmax" and self.experts.groups == 1 else self._scores(logits)
        if bias is not None:
            ranked = ranked + bias
        if self.experts.groups > 1:
            ranked = self._within_groups(ranked)
        return ranked.topk(self.experts.per_token).indices

    def weights(self, logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, E] and chosen experts [n, k] -> weights [n, E], 0 where not chosen, and bool [n, E] chosen."""
        weights = self._scores(logits).gather(1, index)
        if self.experts.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, True)
        return torch.zeros_like(logits).scatter(1, index, weights * self.experts.scale), chosen

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.names.score == "sigmoid" else logits.softmax(-1)

    def _within_groups(self, ranked: Tensor) -> Tensor:
        """-inf at experts [n, E] outside the token's best groups."""
        by_group = ranked.unflatten(1, (self.experts.groups, -1))
        worth = by_group.topk(self.names.group_best).values.sum(-1)
        best = worth.topk(self.experts.groups_per_token).indices
        left_out = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
        return by_group.masked_fill(left_out[..., None], float("-inf")).flatten(1)


class RouterWatch:
    """What the routers of one rank share: the rows of the pass, what the losses weigh, and what each expert got."""

    rows: RowPairs | None = None
    """Of the pass that the next router belongs to."""

    def __init__(self, config: TransformerConfig, shape: ModelConfig) -> None:
        experts, names = shape.experts, shape.traits.experts
        if experts is None or names is None:
            raise ValueError(f"a {shape.family} model has no experts")
        self._config, self._experts, self._names = config, experts, names
        self._layers = shape.layers - experts.first_dense
        self._routers: list[RowRouter] = []
        self.routes = Routes(self._layers, experts.per_token)
        self._losses = RouterSpec()
        self._row_weight, self._scale = 0.0, 0.0
        self._chosen, self._balance, self._load = torch.zeros(0), torch.zeros(()), torch.zeros(0)

    def see(self, router: RowRouter, layer: int) -> None:
        """Share what a router of this rank does; `layer` counts from 0 over the whole model."""
        router.join(self, layer - self._experts.first_dense, self._experts, self._names)
        self._routers.append(router)

    @contextmanager
    def step(self, losses: RouterSpec, row_weight: float, scale: float, device: torch.device) -> Iterator[None]:
        """Inside the block a pass adds `scale` times the losses, of which each row has the share `row_weight`; counts start anew."""
        self._losses, self._row_weight, self._scale = losses, row_weight, scale
        self._chosen = torch.zeros(self._layers, self._experts.count, device=device)
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
        with torch.set_grad_enabled(self._losses.has_losses):
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
        fraction = picked * (logits.shape[1] / self._experts.per_token) / rows.lengths
        balance = (fraction * rows.sums(self._shares(logits)) / rows.lengths).sum() * self._row_weight
        self._balance += balance.detach()
        loss = self._losses.balance_loss * balance
        if self._losses.z_loss:
            square = logits.logsumexp(-1, keepdim=True).square()
            loss = loss + self._losses.z_loss * self._row_weight * (rows.sums(square) / rows.lengths).sum()
        return loss

    def _shares(self, logits: Tensor) -> Tensor:
        """[n, E] of which each row sums to 1."""
        if self._names.score == "softmax":
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def metrics(self) -> Tensor:
        """`ROUTER_METRICS` float32 [3] of the last step, on every rank: one all-reduce."""
        found = torch.cat([self._chosen.flatten(), self._balance[None]])
        dist.all_reduce(found)
        self._load = load = found[:-1].view_as(self._chosen)
        share = load * load.shape[1] / load.sum(1, keepdim=True).clamp(min=1.0)
        return torch.stack([share.max(), share.min(), found[-1] / load.shape[0]])

    @torch.no_grad()
    def move_biases(self, rate: float) -> None:
        """Move the biases by `rate` after the step that `metrics` told of."""
        for router in self._routers:
            if rate and router.score_bias is not None:
                load = self._load[router.layer].double()
                router.score_bias.add_((load.mean() - load).sign().float(), alpha=rate)


class _WithLoss(torch.autograd.Function):
    """The first input, which hands the second one, a loss, a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())
