"""A frozen model's likeliest tokens at the trained places of a batch: one walk without gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.layouts import MicroBatch, plan_microbatches
from nemo_rl_like.policy.backend import Backend, TopRequest
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch


@dataclass(frozen=True, slots=True)
class TopK:
    """Which of a teacher's log-probs are asked for."""

    k: int
    """Tokens at each place."""
    temperature: float
    """Divides the logits."""
    below: int | None = None
    """Only ids below this are told: the student's vocabulary, which may have fewer rows; None: all."""
    teacher: int | None = None
    """Only rows whose column `teacher` is this; None: all rows."""

    def rows(self, batch: TokenBatch) -> Tensor:
        """bool [B] the rows that are asked for."""
        trained = batch.trained_per_row > 0
        return trained if self.teacher is None else trained & (batch.column("teacher") == self.teacher)


def top_of_batch(backend: Backend, batch: TokenBatch, asked: TopK, policy: PolicySpec) -> tuple[Tensor, Tensor]:
    """Ids int32 [N, K] and log-probs float32 [N, K] at the trained tokens of the asked rows, equal on every rank; 0 elsewhere.

    Collective over the policy's ranks. Raises ValueError as `top_logprobs` does.
    """
    device = runtime.device()
    dp_size, dp_rank = backend.replicas
    micro_batches = plan_microbatches(
        batch,
        asked.rows(batch).nonzero()[:, 0].tolist(),
        dp_size=dp_size,
        dp_rank=dp_rank,
        kind=policy.rows,
        token_budget=policy.micro_batch_tokens,
        pair_cost=backend.pair_cost,
    )
    ids = torch.zeros(batch.tokens.numel(), asked.k, dtype=torch.int32, device=device)
    logprobs = torch.zeros(batch.tokens.numel(), asked.k, dtype=torch.float32, device=device)

    request = TopRequest(asked.k, asked.temperature, asked.below)

    def keep(micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        top = backend.top(hidden, micro_batch, request)
        ids[micro_batch.source_index] = top.ids.int()
        logprobs[micro_batch.source_index] = top.logprobs
        return logprobs.new_zeros(())

    backend.run(micro_batches, keep, training=False)
    return backend.share(ids), backend.share(logprobs)
