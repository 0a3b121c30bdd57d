"""A frozen model's likeliest tokens at the trained places of a batch: one walk without gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.heads import output_head
from nemo_rl_like.model.layouts import MicroBatch, attention_pair_cost, plan_microbatches
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.top_logprobs import top_logprobs
from nemo_rl_like.policy.ddp import Reduce, run_schedule
from nemo_rl_like.policy.share import from_last_stages
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


def top_of_batch(model: MegatronModel, batch: TokenBatch, asked: TopK, policy: PolicySpec) -> tuple[Tensor, Tensor]:
    """Ids int32 [N, K] and log-probs float32 [N, K] at the trained tokens of the asked rows, equal on every rank; 0 elsewhere.

    Collective over the policy's ranks. Raises ValueError as `top_logprobs` does.
    """
    device = runtime.device()
    micro_batches = plan_microbatches(
        batch,
        asked.rows(batch).nonzero()[:, 0].tolist(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        kind=policy.rows,
        token_budget=policy.micro_batch_tokens,
        pair_cost=attention_pair_cost(model.shape),
    )
    ids = torch.zeros(batch.tokens.numel(), asked.k, dtype=torch.int32, device=device)
    logprobs = torch.zeros(batch.tokens.numel(), asked.k, dtype=torch.float32, device=device)

    def forward(iterator: Iterator[MicroBatch], model: MegatronModel) -> tuple[Tensor, Reduce]:
        micro_batch = next(iterator).to(device, model.dtype)
        return model(micro_batch), partial(keep, micro_batch)

    def keep(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        top = top_logprobs(
            hidden,
            output_head(model),
            asked.k,
            temperature=asked.temperature,
            chunk_tokens=policy.logprob_chunk_tokens,
            below=asked.below,
        )
        mine, context = model.scored_here(micro_batch), model.context
        if mine is not None and context is not None:
            count = len(micro_batch.targets)
            top = replace(
                top, ids=context.whole(top.ids, mine, count), logprobs=context.whole(top.logprobs, mine, count)
            )
        ids[micro_batch.source_index] = top.ids.int()
        logprobs[micro_batch.source_index] = top.logprobs
        return logprobs.new_zeros(()), torch.zeros((), dtype=torch.int, device=device), None

    run_schedule(model, micro_batches, forward, training=False)
    return from_last_stages(ids), from_last_stages(logprobs)
