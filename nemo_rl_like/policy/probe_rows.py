"""Rows of plain token ids, to ask a model about."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl_like.tokens.batch import TokenBatch


def probe_batch(rows: Sequence[Sequence[int]]) -> TokenBatch:
    """Rows of plain token ids in which every token after the first is scored."""
    lengths = torch.tensor([len(row) for row in rows])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(cu[-1])
    mask = torch.ones(count, dtype=torch.bool)
    mask[cu[:-1]] = False
    ids = torch.arange(len(rows))
    return TokenBatch(
        tokens=torch.tensor([t for row in rows for t in row]),
        cu_seqlens=cu,
        prompt_lens=torch.ones(len(rows), dtype=torch.int64),
        loss_mask=mask,
        behavior=torch.zeros(count),
        version=torch.full((count,), -1, dtype=torch.int32),
        prompt_id=ids,
        group_id=ids,
        episode_id=ids,
        valid=torch.ones(len(rows), dtype=torch.bool),
    )
