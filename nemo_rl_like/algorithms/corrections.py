"""Weights and masks [M] for log-probs that differ between the engine and the trainer, w = exp(proximal - behavior); without gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_like.algorithms.sequences import Scored, bounded_exp
from nemo_rl_like.spec import corrections as spec


def tis(tokens: Scored, options: spec.TisCorrection) -> Tensor:
    """min(w, cap). Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training", truncated importance sampling."""
    return bounded_exp(_mismatch(tokens)).clamp(max=options.cap)


def icepop(tokens: Scored, options: spec.IcePopCorrection) -> Tensor:
    """w inside [low, high], 0 outside. Ling team 2025 (arXiv 2510.18855), IcePop."""
    weight = bounded_exp(_mismatch(tokens))
    return torch.where((weight >= options.low) & (weight <= options.high), weight, 0.0)


def sequence_tis(tokens: Scored, options: spec.SequenceTisCorrection) -> Tensor:
    """min(product of w over the sequence, cap)."""
    return tokens.spread(bounded_exp(tokens.sum(_mismatch(tokens))).clamp(max=options.cap))


def sequence_mask(tokens: Scored, options: spec.SequenceMaskCorrection) -> Tensor:
    """1 where the product of w over the sequence is inside [low, high], else 0."""
    return tokens.spread(_inside(tokens.sum(_mismatch(tokens)), options.low, options.high))


def geometric_mask(tokens: Scored, options: spec.GeometricMaskCorrection) -> Tensor:
    """1 where exp(mean of log w over the sequence) is inside [low, high], else 0."""
    return tokens.spread(_inside(tokens.mean(_mismatch(tokens)), options.low, options.high))


def off_policy_mask(tokens: Scored, options: spec.OffPolicyMaskCorrection) -> Tensor:
    """1 where the sequence's mean advantage is >= 0 or mean(behavior - current) <= delta, else 0. DeepSeek-V3.2 2025 (arXiv 2512.02556)."""
    away = tokens.mean(tokens.values["behavior"] - tokens.current)
    keep = (tokens.mean(tokens.advantage) >= 0) | (away <= options.delta)
    return tokens.spread(keep.to(tokens.current.dtype))


CORRECTIONS: dict[str, Callable[[Scored, Any], Tensor]] = {
    "tis": tis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
    "off_policy_mask": off_policy_mask,
}
BY_SEQUENCE = frozenset(CORRECTIONS) - {"tis", "icepop"}
"""Corrections that need all tokens of a sequence in the same pass."""


@torch.no_grad()
def correction(chosen: Sequence[spec.CorrectionSpec], tokens: Scored) -> Tensor:
    """[M] product of the chosen weights and masks; ones if there are none."""
    out = torch.ones_like(tokens.current)
    for options in chosen:
        out = out * CORRECTIONS[options.kind](tokens, options)
    return out


def _mismatch(tokens: Scored) -> Tensor:
    return tokens.proximal - tokens.values["behavior"]


def _inside(log_weight: Tensor, low: float, high: float) -> Tensor:
    weight = bounded_exp(log_weight)
    return ((weight >= low) & (weight <= high)).to(weight.dtype)
