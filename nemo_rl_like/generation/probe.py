"""Proof by function that an engine holds the trainer's weights: both score the same tokens, and the gap is bounded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.gap import gap_quantiles


@dataclass(frozen=True, slots=True)
class GapReport:
    """Quantiles of |engine - trainer| log-prob, in nats."""

    p50: float
    p99: float
    max: float
    tokens: int
    """Tokens compared."""


def probe_prompts(vocab_size: int, *, count: int, tokens: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """`count` fixed rows of `tokens` token ids in 0 .. vocab_size - 1; the same arguments give the same rows anywhere."""
    return tuple(tuple(_hashed(seed, row, position) % vocab_size for position in range(tokens)) for row in range(count))


def probe_gap(engine_logprobs: Sequence[Sequence[float]], trainer_logprobs: Sequence[Sequence[float]]) -> GapReport:
    """Compare log-probs of the same rows. A NaN on either side counts as an infinite gap.

    Raises ValueError if the rows or their lengths differ or nothing is compared.
    """
    lengths = ([len(row) for row in engine_logprobs], [len(row) for row in trainer_logprobs])
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        raise ValueError(
            f"engine scored rows of {lengths[0]} tokens, trainer of {lengths[1]}; both need the same, not none"
        )
    engine = torch.tensor([x for row in engine_logprobs for x in row], dtype=torch.float64)
    trainer = torch.tensor([x for row in trainer_logprobs for x in row], dtype=torch.float64)
    p50, p99, largest = gap_quantiles(engine, trainer).tolist()
    return GapReport(p50=p50, p99=p99, max=largest, tokens=engine.numel())


def check_gap(report: GapReport, limit: float, what: str) -> None:
    """Raise WeightSyncError with the measured and the allowed gap if `report.p99` is above `limit` (nats).

    `what` names what was compared, for example `probe prompts at weight version 3`.
    """
    if report.p99 <= limit:
        return
    raise WeightSyncError(
        f"{what}: |engine - trainer| log-prob has p99 {report.p99:.3g} nats over {report.tokens} tokens "
        f"(p50 {report.p50:.3g}, max {report.max:.3g}), more than the limit {limit:g} (engine.max_gap_p99). The engine "
        "holds other weights, a stale head or prefix cache, or computes in a lower precision; bfloat16 needs a limit of "
        "about 0.3"
    )


def _hashed(*numbers: int) -> int:
    text = ",".join(str(number) for number in numbers)
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "little")
