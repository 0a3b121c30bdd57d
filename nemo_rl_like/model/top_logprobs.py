"""The likeliest tokens of a distribution over the vocabulary: what a teacher tells of each place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.heads import OutputHead, scaled_logits

_NO_ID = (1 << 31) - 1
"""Id of a place that a rank with too few tokens leaves empty; its logit is -inf, and it loses every tie."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The K likeliest tokens at each of M places, likeliest first; of equally likely ones the lower id."""

    ids: Tensor
    """int64 [M, K]"""
    logprobs: Tensor
    """float32 [M, K] log-softmax(logits / temperature) over the whole vocabulary, in nats."""


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, head: OutputHead, k: int, *, temperature: float, chunk_tokens: int, below: int | None = None
) -> TopLogprobs:
    """The `k` likeliest tokens after each of `hidden` [M, H], without gradient; equal on every tensor-parallel rank.

    log p(y) = z_y - logsumexp(z) with z = hidden @ weight.T / temperature, capped if the head has a cap. Only ids below `below` are taken (default: all); the
    others stay in the normaliser. The logits of at most `chunk_tokens` places exist at once. Collective over the head's
    tensor-parallel ranks, which take their own k likeliest tokens, gather them, and take the k likeliest of those.
    Raises ValueError if `k` is not in 1..`below`, or `temperature` or `chunk_tokens` is not positive.
    """
    limit = min(below or head.vocab_size, head.vocab_size)
    if not 1 <= k <= limit:
        raise ValueError(f"k is {k}, must be in 1..{limit}, the tokens to choose from")
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"temperature is {temperature} and chunk_tokens {chunk_tokens}; both must be positive")
    if not hidden.shape[0]:
        return TopLogprobs(
            hidden.new_zeros(0, k, dtype=torch.int64), torch.zeros(0, k, dtype=torch.float32, device=hidden.device)
        )
    parts = [_of_shard(part, head, k, temperature, limit) for part in hidden.split(chunk_tokens)]
    ids, values, log_norm = (torch.cat(column) for column in zip(*parts, strict=True))
    if head.tp_group is not None:
        ids, values, log_norm = _over_ranks(ids, values, log_norm, head.tp_group)
        ids, values = _largest(ids, values, k)
    return TopLogprobs(ids, values - log_norm)


def _of_shard(
    hidden: Tensor, head: OutputHead, k: int, temperature: float, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and logits [c, k] of this rank's likeliest tokens below `limit`, and its logsumexp [c, 1]."""
    logits = scaled_logits(hidden, head.weight[: head.real_rows], temperature, head.cap)
    log_norm = logits.logsumexp(dim=1, keepdim=True)
    count = min(max(limit - head.first_token, 0), head.real_rows)
    ids = torch.arange(head.first_token, head.first_token + count, device=hidden.device).expand(hidden.shape[0], -1)
    ids, values = _largest(ids, logits[:, :count], min(k, count))
    missing = (0, k - ids.shape[1])
    return functional.pad(ids, missing, value=_NO_ID), functional.pad(values, missing, value=-torch.inf), log_norm


def _over_ranks(ids: Tensor, values: Tensor, log_norm: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """[M, ranks * k] ids and logits of all ranks, and the whole vocabulary's logsumexp [M, 1]."""
    numbers = torch.cat([values, log_norm], dim=1)
    all_ids, all_numbers = ([torch.empty_like(x) for _ in range(group.size())] for x in (ids, numbers))
    dist.all_gather(all_ids, ids, group=group)
    dist.all_gather(all_numbers, numbers, group=group)
    whole = torch.stack(all_numbers)
    return torch.cat(all_ids, dim=1), torch.cat(list(whole[..., :-1]), dim=1), whole[..., -1:].logsumexp(dim=0)


def _largest(ids: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of float32 `values` [r, n] and their ids, largest first, of equal ones the lower id.

    One integer orders both: the value's bits, made monotone, before those of the negated id. No two are equal, so that the
    choice does not depend on the device.
    """
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0, its equal
    monotone = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    best = ((monotone << 32) | (0xFFFFFFFF - ids)).topk(k, dim=1).indices
    return ids.gather(1, best), values.gather(1, best)
