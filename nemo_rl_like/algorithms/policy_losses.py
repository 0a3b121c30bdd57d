"""Policy losses, to minimise: [M] losses of scored tokens. A loss with one value a sequence puts it on each of the sequence's tokens,
which `sequence_mean` weighs by 1 / (sequences * length).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_like.algorithms.sequences import Scored, bounded_exp
from nemo_rl_like.spec import policy_losses as spec


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses [M] and, without gradient, the ratio [M] and where clipping was active below and above, bool [M]."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clip(tokens: Scored, options: spec.ClipLoss | spec.ClipCovLoss) -> PolicyLoss:
    """-min(r A, clip(r, 1-low, 1+high) A), r = exp(current - proximal); never above -dual A where A < 0; r capped at `delta` in r A.

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7; clip-higher: Yu et al. 2025 (arXiv 2503.14476); dual clip: Ye et al. 2020
    (arXiv 1912.09729), eq. 5; two-sided: INTELLECT-2 2025 (arXiv 2505.07291).
    """
    ratio = bounded_exp(tokens.log_ratio)
    dual = options.dual if isinstance(options, spec.ClipLoss) else None
    delta = options.delta if isinstance(options, spec.ClipLoss) else None
    loss = _clipped(ratio, tokens.advantage, options.low, options.high, delta)
    if dual is not None:
        loss = torch.where(tokens.advantage < 0, torch.minimum(loss, -dual * tokens.advantage), loss)
    return _told(loss, ratio, tokens.advantage, options.low, options.high)


def reinforce(tokens: Scored, options: spec.ReinforceLoss) -> PolicyLoss:
    """-A current. Williams 1992; the ratio is reported, not used."""
    return _unclipped(-tokens.advantage * tokens.current, tokens)


def gspo(tokens: Scored, options: spec.GspoLoss) -> PolicyLoss:
    """-min(s A, clip(s) A), s = exp(mean_t of log-ratios), A the mean advantage. Zheng et al. 2025 (arXiv 2507.18071)."""
    ratio = bounded_exp(tokens.mean(tokens.log_ratio))
    advantage = tokens.mean(tokens.advantage)
    told = _told(_clipped(ratio, advantage, options.low, options.high), ratio, advantage, options.low, options.high)
    return PolicyLoss(*(tokens.spread(x) for x in (told.loss, told.ratio, told.clipped_low, told.clipped_high)))


def gspo_token(tokens: Scored, options: spec.GspoTokenLoss) -> PolicyLoss:
    """As clip, with the ratio sg(s) exp(current - sg(current)), s as in GSPO. Zheng et al. 2025 (arXiv 2507.18071)."""
    whole = tokens.spread(bounded_exp(tokens.mean(tokens.log_ratio))).detach()
    ratio = whole * (tokens.current - tokens.current.detach()).exp()
    loss = _clipped(ratio, tokens.advantage, options.low, options.high)
    return _told(loss, ratio, tokens.advantage, options.low, options.high)


def gmpo(tokens: Scored, options: spec.GmpoLoss) -> PolicyLoss:
    """-A exp(mean_t d), d = min(log-ratio, high) for A > 0, max(log-ratio, -low) else. Zhao et al. 2025 (arXiv 2507.20673)."""
    advantage = tokens.mean(tokens.advantage)
    sign = tokens.spread(advantage)
    change = tokens.log_ratio
    bounded = torch.where(sign > 0, change.clamp(max=options.high), change.clamp(min=-options.low))
    loss = tokens.spread(-advantage * bounded_exp(tokens.mean(bounded)))
    with torch.no_grad():
        low, high = (change < -options.low) & (sign < 0), (change > options.high) & (sign > 0)
    return PolicyLoss(loss, bounded_exp(change).detach(), low, high)


def cispo(tokens: Scored, options: spec.CispoLoss) -> PolicyLoss:
    """-sg(min(r, cap)) A current. MiniMax-M1 2025 (arXiv 2506.13585)."""
    ratio = bounded_exp(tokens.log_ratio).detach()
    loss = -ratio.clamp(max=options.cap) * tokens.advantage * tokens.current
    return PolicyLoss(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool), ratio > options.cap)


def sapo(tokens: Scored, options: spec.SapoLoss) -> PolicyLoss:
    """-f(r) A, f(r) = (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A. Gao et al. 2025 (SAPO, arXiv 2511.20347)."""
    ratio = bounded_exp(tokens.log_ratio)
    tau = torch.where(tokens.advantage > 0, options.tau_positive, options.tau_negative).to(ratio.dtype)
    return _unclipped(-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * tokens.advantage, tokens)


def gpg(tokens: Scored, options: spec.GpgLoss) -> PolicyLoss:
    """-alpha A current, alpha = groups / groups with an advantage other than 0. Chu et al. 2025 (GPG, arXiv 2504.02546)."""
    return _unclipped(-tokens.values["group_scale"] * tokens.advantage * tokens.current, tokens)


def kl_cov(tokens: Scored, options: spec.KlCovLoss) -> PolicyLoss:
    """-r A + coef |current - proximal| at selected tokens, -r A elsewhere. Cui et al. 2025 (arXiv 2505.22617).

    Selected: the max(1, floor(fraction * N)) tokens of largest covariance, as far as it is above 0.
    """
    change = tokens.log_ratio
    penalty = torch.where(tokens.values["selected"] > 0, options.coef * change.abs(), 0.0)
    return _unclipped(-bounded_exp(change) * tokens.advantage + penalty, tokens)


def clip_cov(tokens: Scored, options: spec.ClipCovLoss) -> PolicyLoss:
    """0 at selected tokens, PPO's clip loss elsewhere. Cui et al. 2025 (arXiv 2505.22617)."""
    told = clip(tokens, options)
    return PolicyLoss(
        torch.where(tokens.values["selected"] > 0, 0.0, told.loss), told.ratio, told.clipped_low, told.clipped_high
    )


LOSSES: dict[str, Callable[[Scored, Any], PolicyLoss]] = {
    "clip": clip,
    "reinforce": reinforce,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "kl_cov": kl_cov,
    "clip_cov": clip_cov,
}
BY_SEQUENCE = frozenset({"gspo", "gspo_token", "gmpo"})
"""Losses that need all tokens of a sequence in the same pass."""
NO_ADVANTAGE_NO_GRADIENT = frozenset(LOSSES) - {"kl_cov"}
"""Losses whose value and gradient are 0 at tokens of zero advantage."""


def policy_loss(options: spec.PolicyLossSpec, tokens: Scored) -> PolicyLoss:
    """The loss that `options` names."""
    return LOSSES[options.kind](tokens, options)


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, delta: float | None = None) -> Tensor:
    free = ratio if delta is None else ratio.clamp(max=delta)
    return torch.maximum(-free * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)


def _told(loss: Tensor, ratio: Tensor, advantage: Tensor, low: float, high: float) -> PolicyLoss:
    ratio = ratio.detach()
    return PolicyLoss(loss, ratio, *outside(ratio, advantage, low, high))


def outside(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where PPO's clipping takes the gradient away: below (A < 0) and above (A > 0), bool [M] each."""
    return (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)


def _unclipped(loss: Tensor, tokens: Scored) -> PolicyLoss:
    ratio = bounded_exp(tokens.log_ratio).detach()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(loss, ratio, never, never)
