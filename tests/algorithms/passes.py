"""A step cut into passes as the planner would, and an objective's loss and gradient over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nemo_rl_like.algorithms.objectives import Objective, Outputs
from nemo_rl_like.model.layouts import plan_microbatches
from nemo_rl_like.tokens.batch import TokenBatch


def made(objective: Objective, batch: TokenBatch, current: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The package's loss over passes given as places [m] in the batch, and its gradient by `current` float64 [N]."""
    loss, slope, _ = with_metrics(objective, batch, current, parts)
    return loss, slope


def with_metrics(
    objective: Objective, batch: TokenBatch, current: Tensor, parts: Sequence[Tensor]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """As `made`, and the metrics summed over the passes."""
    stats = objective.prepare(batch)
    at = current.clone().requires_grad_()
    total = at.new_zeros(())
    metrics = dict.fromkeys(objective.metric_names, 0.0)
    for part in parts:
        values = {name: wide(value[part]) for name, value in stats.values.items()}
        further = {name: wide(batch.extras[name][part]) for name in ("entropy", "collision") if name in batch.extras}
        out = objective.loss(Outputs(at[part], **further), values, stats.weights[part].double(), stats)
        assert set(out.metrics) == set(objective.metric_names)
        metrics = {name: metrics[name] + float(out.metrics[name]) for name in metrics}
        total = total + out.loss
    (slope,) = torch.autograd.grad(total, at)
    return total.detach(), slope, metrics


def wide(values: Tensor) -> Tensor:
    """float64, but for indices."""
    return values.double() if values.is_floating_point() else values


def splits(objective: Objective, batch: TokenBatch) -> Iterator[list[Tensor]]:
    """The places that the planner gives to each pass: every kind of row, few and many passes, one and two ranks."""
    live = objective.prepare(batch).live_rows.nonzero()[:, 0].tolist()
    together = objective.together(batch)
    for kind, budget, ranks in (
        ("shared_prefix", 10_000, 1),
        ("shared_prefix", 12, 2),
        ("packed", 14, 1),
        ("packed", 10_000, 2),
        ("padded", 18, 2),
    ):
        yield [
            pass_.source_index
            for rank in range(ranks)
            for pass_ in plan_microbatches(
                batch, live, dp_size=ranks, dp_rank=rank, kind=kind, token_budget=budget, together=together
            )
        ]
