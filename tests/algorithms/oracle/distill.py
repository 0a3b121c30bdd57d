"""Section 9 of numerics.md: divergences between a student and a teacher at one token, as sums over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def number(x: Tensor | float) -> Tensor:
    """A float64 0-d tensor; a tensor keeps its gradient."""
    return torch.as_tensor(x, dtype=torch.float64)


def log_softmax(logits: list[Tensor] | list[float], temperature: float = 1.0) -> list[Tensor]:
    """log p_v = z_v / T - log sum_u exp(z_u / T)."""
    scaled = [number(z) / temperature for z in logits]
    peak = max(z.item() for z in scaled)
    norm = number(0.0)
    for z in scaled:
        norm = norm + torch.exp(z - peak)
    return [z - peak - torch.log(norm) for z in scaled]


def kl(p: list[Tensor], q: list[Tensor]) -> Tensor:
    """KL(P||Q) = sum_v p_v (log p_v - log q_v), from log-probs."""
    total = number(0.0)
    for a, b in zip(p, q, strict=True):
        total = total + torch.exp(a) * (a - b)
    return total


def divergence(student: list[Tensor], teacher: list[Tensor], beta: float) -> Tensor:
    """beta KL(T||M) + (1 - beta) KL(S||M), M = (1 - beta) S + beta T; beta 0: KL(T||S), beta 1: KL(S||T)."""
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    middle = []
    for s, t in zip(student, teacher, strict=True):
        middle.append(torch.log((1 - beta) * torch.exp(s) + beta * torch.exp(t)))
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


def gkd(
    student_logits: list[Tensor] | list[float],
    teacher_logits: list[Tensor] | list[float],
    beta: float,
    temperature: float = 1.0,
) -> Tensor:
    """The divergence of softmax(student / T) and softmax(teacher / T) at one token; no factor T^2."""
    return divergence(log_softmax(student_logits, temperature), log_softmax(teacher_logits, temperature), beta)


def with_tail(logprobs: list[Tensor], kept: list[int]) -> list[Tensor]:
    """The kept ids' log-probs and, last, the log of the mass of all other ids."""
    rest = number(0.0)
    for v, x in enumerate(logprobs):
        if v not in kept:
            rest = rest + torch.exp(x)
    return [logprobs[v] for v in kept] + [torch.log(rest)]


def gkd_top_k(
    student_logits: list[Tensor] | list[float],
    teacher_logits: list[Tensor] | list[float],
    kept: list[int],
    beta: float,
    temperature: float = 1.0,
) -> Tensor:
    """gkd over the kept ids (the teacher's top k) and one event for the tail; at least one id is in the tail."""
    student = with_tail(log_softmax(student_logits, temperature), kept)
    teacher = with_tail(log_softmax(teacher_logits, temperature), kept)
    return divergence(student, teacher, beta)
