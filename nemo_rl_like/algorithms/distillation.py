"""`Distillation`: the generalized Jensen-Shannon divergence between a student and a teacher, of whom the k likeliest tokens are known.

Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD, arXiv 2306.13649). What is not among the teacher's k tokens
is one more event, the tail, on both sides, so that both stay distributions. With k the whole vocabulary it is empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.algorithms import aggregation
from nemo_rl_like.algorithms.objectives import LossSum, Outputs, StepStats
from nemo_rl_like.spec.distill import DistillationSpec
from nemo_rl_like.tokens.batch import TokenBatch

IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Extras [N, K] of the batch: the teacher's likeliest tokens, likeliest first, and their log-probs."""
TAIL_FLOOR = 1e-6
"""Smallest mass of a tail: float32 log-probs tell no less apart from none."""


def with_tail(logprobs: Tensor) -> Tensor:
    """[M, K] log-probs of K tokens -> [M, K + 1] with log(1 - sum of their probabilities) behind them.

    A mass below `TAIL_FLOOR` counts as that much, also where rounding leaves less than nothing; its gradient goes on, divided by
    the floor. Two tails at the floor add nothing to a divergence.
    """
    mass = -torch.expm1(logprobs.logsumexp(dim=-1, keepdim=True))
    floored = mass.detach().clamp(min=TAIL_FLOOR)
    tail = floored.log() + (mass - mass.detach()) / floored
    return torch.cat([logprobs, tail], dim=-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(P||Q) = sum_v p_v (log p_v - log q_v) of log-probs [M, V], as [M]; 0 where p_v is."""
    return (p.exp() * (p - q)).sum(dim=-1)


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """beta KL(T||M) + (1 - beta) KL(S||M), M = (1 - beta) S + beta T, of log-probs [M, V], as [M] in nats; eq. 1 of the paper.

    beta 0 is KL(T||S) and beta 1 is KL(S||T), the limits of the divergence over beta and over 1 - beta. TRL's `beta` is the same.
    Raises ValueError if beta is not in [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}, must be in 0..1")
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    middle = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


@dataclass(frozen=True, slots=True)
class Distillation:
    """Mean over the step's trained tokens of the divergence, plus `sft_coef` times the mean of -log p over the data's own tokens.

    Reads the extras `teacher_ids` and `teacher_logprobs` [N, K], and with `sft_coef` the column `sampled`, 1 for rows that the
    student wrote itself. Both sides' logits are divided by the temperature of the walk; no factor of its square.
    """

    options: DistillationSpec
    needs_entropy: bool = False
    needs_collision: bool = False
    needs_log_norm: bool = False
    looks_first: bool = False
    metric_names: tuple[str, ...] = ("loss", "kl/forward", "kl/reverse", "teacher_tail", "agreement", "nll")
    """`kl/forward` KL(T||S), `kl/reverse` KL(S||T), the teacher's mass outside its k tokens, how often the student likes the same
    one of them best, and -log p of the text: means over trained tokens."""

    def together(self, batch: TokenBatch) -> Tensor | None:
        """Any split will do."""
        return None

    def prepare(self, batch: TokenBatch) -> StepStats:
        """Token-mean weights over the step. Raises ValueError where the batch lacks what the loss reads."""
        missing = [name for name in (IDS, LOGPROBS) if name not in batch.extras]
        if missing:
            raise ValueError(f"distillation needs the extras {', '.join(missing)}, and the batch has none")
        weights = _token_mean(batch, batch.loss_mask)
        values = {"teacher": batch.extras[LOGPROBS]}
        if self.options.sft_coef:
            values["own"] = _token_mean(batch, batch.loss_mask & (batch.column("sampled") == 0)[batch.row_of_token])
        return StepStats(
            weights=weights,
            tokens=float(batch.loss_mask.sum()),
            live_rows=batch.trained_per_row > 0,
            values=values,
            candidates=batch.extras[IDS],
        )

    def loss(self, outputs: Outputs, values: dict[str, Tensor], weights: Tensor, stats: StepStats) -> LossSum:
        """sum w D(S, T) - sft_coef sum w_own log p; `outputs.candidates` are the student's log-probs of the teacher's tokens."""
        if outputs.candidates is None:
            raise ValueError("distillation needs `Outputs.candidates`, and they were not computed")
        student, teacher = with_tail(outputs.candidates), with_tail(values["teacher"])
        loss = (weights * generalized_jsd(student, teacher, self.options.beta)).sum()
        if self.options.sft_coef:
            loss = loss - self.options.sft_coef * (values["own"] * outputs.logprobs).sum()
        return LossSum(loss, {"loss": loss.detach(), **_told(student, teacher, outputs.logprobs, weights)})


def _token_mean(batch: TokenBatch, mask: Tensor) -> Tensor:
    return aggregation.token_weights("token_mean", mask, batch.row_of_token, batch.rows)


@torch.no_grad()
def _told(student: Tensor, teacher: Tensor, logprobs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Metrics but for the loss, from log-probs with their tails [M, K + 1]."""
    same = student[:, :-1].argmax(dim=1) == 0
    return {
        "kl/forward": (weights * kl(teacher, student)).sum(),
        "kl/reverse": (weights * kl(student, teacher)).sum(),
        "teacher_tail": (weights * teacher[:, -1].exp()).sum(),
        "agreement": (weights * same).sum(),
        "nll": -(weights * logprobs).sum(),
    }
