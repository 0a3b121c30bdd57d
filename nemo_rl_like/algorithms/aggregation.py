"""Aggregation as one weight a token: the loss of any split of the data is the plain sum of weight * token loss."""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "sequence_mean",
)


def token_weights(name: str, mask: Tensor, sequence: Tensor, sequences: int, max_length: int | None = None) -> Tensor:
    """Weight of each token's loss, float32 [N], 0 where `mask` is false.

    `token_mean` 1/N_tokens; `sequence_mean_token_mean` 1/(N_seq T_i); `sequence_mean_token_sum` 1/N_seq;
    `sequence_mean_token_sum_norm` 1/(N_seq L_max) (Dr. GRPO, arXiv 2503.20783); `sequence_mean` of one value a sequence, spread
    over its tokens: 1/(N_seq T_i).
    Args: `mask` bool [N]; `sequence` int64 [N] in 0..sequences-1; `max_length` L_max in tokens, only for the last.
    The counts are those of the whole optimizer step: call it on the whole minibatch, never on a micro-batch.
    N_seq counts sequences with at least one trained token. All-masked input gives all zeros.
    Raises ValueError for an unknown name or a missing `max_length`.
    """
    if name not in NAMES:
        raise ValueError(f"aggregation is {name!r}, must be one of {', '.join(NAMES)}")
    live = mask.double()
    lengths = torch.zeros(sequences, dtype=torch.float64).index_add_(0, sequence, live)
    n_seq = (lengths > 0).sum().clamp(min=1).double()
    if name == "token_mean":
        weights = live / live.sum().clamp(min=1)
    elif name in ("sequence_mean_token_mean", "sequence_mean"):
        weights = live / (n_seq * lengths.clamp(min=1)[sequence])
    elif name == "sequence_mean_token_sum":
        weights = live / n_seq
    else:
        if not max_length:
            raise ValueError(
                "sequence_mean_token_sum_norm needs `max_length` (the spec's aggregation_length), in tokens"
            )
        weights = live / (n_seq * max_length)
    return weights.float()
