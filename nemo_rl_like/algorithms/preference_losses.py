"""Preference losses, to minimise: [P] losses of P pairs from each completion's log-probs; pure and without any state.

pi and ref are a completion's summed log-probs, T its trained tokens, u = pi - ref, h = u_c - u_r, ls = log sigmoid, sig = sigmoid;
c is the chosen and r the rejected completion. Exponents are bounded at 20, so that log-ratios of any size are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl_like.algorithms.sequences import bounded_exp
from nemo_rl_like.spec import preference as spec

ALMOST_CERTAIN = -1e-6
"""Mean log-probs of ORPO's odds stay below this: the odds of probability 1 are infinite."""


@dataclass(frozen=True, slots=True)
class Completions:
    """One completion of each of P pairs, in nats."""

    logp: Tensor
    """[P] pi, summed over the completion's tokens."""
    tokens: Tensor
    """[P] trained tokens."""
    ratio: Tensor | None
    """[P] u, where there is a reference."""

    @property
    def mean(self) -> Tensor:
        """[P] pi / T."""
        return self.logp / self.tokens

    @property
    def log_ratio(self) -> Tensor:
        """[P] u. Raises ValueError without a reference: a missing one is never taken as 0."""
        if self.ratio is None:
            raise ValueError("the loss needs the reference's log-probs, and there are none")
        return self.ratio


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs with what their losses read beside log-probs."""

    chosen: Completions
    rejected: Completions
    divergence: spec.FDivergenceSpec
    mean_log_ratio: float = 0.0
    """Mean u of the completions of earlier steps, from which bco takes its delta."""
    margin: Tensor | None = None
    """[P] by how much better the chosen completion is, where rows say so."""

    def difference(self, *, by_token: bool = False) -> Tensor:
        """[P] h, each u (a mean over tokens if `by_token`) seen through the f-divergence."""
        ratios = [side.log_ratio / side.tokens if by_token else side.log_ratio for side in (self.chosen, self.rejected)]
        chosen, rejected = (score(u, self.divergence) for u in ratios)
        return chosen - rejected


def score(log_ratio: Tensor, divergence: spec.FDivergenceSpec) -> Tensor:
    """f'(exp(u)) up to a constant: reverse KL u; forward KL -exp(-u); JS ls(u); alpha -exp(-a u) / a.

    Wang et al. 2023 (arXiv 2309.16240), table 1.
    """
    if isinstance(divergence, spec.ForwardKl):
        return -bounded_exp(-log_ratio)
    if isinstance(divergence, spec.JensenShannon):
        return logsigmoid(log_ratio)
    if isinstance(divergence, spec.AlphaDivergence):
        return -bounded_exp(-divergence.alpha * log_ratio) / divergence.alpha
    return log_ratio


# -- losses on h


def dpo(pairs: Pairs, options: spec.DpoLoss) -> Tensor:
    """-(1-e) ls(x) - e ls(-x), x = b h - offset margin, e the label smoothing.

    Rafailov et al. 2023 (arXiv 2305.18290), eq. 7; conservative DPO: Mitchell 2023; offset: Amini et al. 2024 (arXiv 2402.10571).
    """
    x = options.beta * pairs.difference()
    if options.offset:
        if pairs.margin is None:
            raise ValueError("`offset` needs the pairs' margins, and there are none; a missing one is never taken as 0")
        x = x - options.offset * pairs.margin
    return -(1 - options.label_smoothing) * logsigmoid(x) - options.label_smoothing * logsigmoid(-x)


def robust(pairs: Pairs, options: spec.RobustLoss) -> Tensor:
    """[-(1-e) ls(b h) + e ls(-b h)] / (1 - 2 e). Chowdhury et al. 2024 (arXiv 2403.00409)."""
    x, e = options.beta * pairs.difference(), options.label_smoothing
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


def ipo(pairs: Pairs, options: spec.IpoLoss) -> Tensor:
    """(h - 1 / (2 b))^2, h of mean or summed log-probs. Azar et al. 2023 (arXiv 2310.12036), eq. 17."""
    return (pairs.difference(by_token=options.logp_reduction == "mean") - 1 / (2 * options.beta)).square()


def hinge(pairs: Pairs, options: spec.HingeLoss) -> Tensor:
    """max(0, 1 - b h). Zhao et al. 2023 (arXiv 2305.10425); on log-ratios: Liu et al. 2023 (arXiv 2309.06657)."""
    return torch.relu(1 - options.beta * pairs.difference())


def exo(pairs: Pairs, options: spec.ExoLoss) -> Tensor:
    """q (log q - log(1-e)) + (1-q)(log(1-q) - log e), q = sig(b h). Ji et al. 2024 (arXiv 2402.00856), eq. 16."""
    x, e = options.beta * pairs.difference(), options.label_smoothing
    preferred = torch.sigmoid(x) * (logsigmoid(x) - math.log(1 - e))
    return preferred + torch.sigmoid(-x) * (logsigmoid(-x) - math.log(e))


def discopop(pairs: Pairs, options: spec.DiscopopLoss) -> Tensor:
    """(1-s)(-ls(b h)) + s exp(-b h), s = sig(b h / tau). Lu et al. 2024 (arXiv 2406.08414), eq. 5."""
    x = options.beta * pairs.difference()
    blend = torch.sigmoid(x / options.tau)
    return (1 - blend) * -logsigmoid(x) + blend * bounded_exp(-x)


# -- losses on u_c and u_r


def sppo(pairs: Pairs, options: spec.SppoLoss) -> Tensor:
    """(u_c - 1/(2b))^2 + (u_r + 1/(2b))^2. Wu et al. 2024 (arXiv 2405.00675), eq. 4.7 with probabilities 1 and 0."""
    target = 1 / (2 * options.beta)
    return (pairs.chosen.log_ratio - target).square() + (pairs.rejected.log_ratio + target).square()


def nca(pairs: Pairs, options: spec.NcaLoss) -> Tensor:
    """-ls(b u_c) - .5 ls(-b u_c) - .5 ls(-b u_r). Chen et al. 2024 (arXiv 2402.05369), for two completions."""
    chosen, rejected = options.beta * pairs.chosen.log_ratio, options.beta * pairs.rejected.log_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco(pairs: Pairs, options: spec.BcoLoss) -> Tensor:
    """-ls(b u_c - delta) - ls(delta - b u_r), delta the mean reward so far. Jung et al. 2024 (arXiv 2404.04656)."""
    delta = options.beta * pairs.mean_log_ratio
    chosen, rejected = options.beta * pairs.chosen.log_ratio, options.beta * pairs.rejected.log_ratio
    return -logsigmoid(chosen - delta) - logsigmoid(delta - rejected)


def apo_zero(pairs: Pairs, options: spec.ApoZeroLoss) -> Tensor:
    """1 - sig(b u_c) + sig(b u_r). D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7."""
    chosen, rejected = options.beta * pairs.chosen.log_ratio, options.beta * pairs.rejected.log_ratio
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def apo_down(pairs: Pairs, options: spec.ApoDownLoss) -> Tensor:
    """sig(b u_c) + 1 - sig(b h). D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 8."""
    chosen = options.beta * pairs.chosen.log_ratio
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - options.beta * pairs.rejected.log_ratio)


# -- losses without a reference


def simpo(pairs: Pairs, options: spec.SimpoLoss) -> Tensor:
    """-ls(b (pi_c / T_c - pi_r / T_r) - gamma). Meng et al. 2024 (arXiv 2405.14734), eq. 6."""
    return -logsigmoid(options.beta * (pairs.chosen.mean - pairs.rejected.mean) - options.gamma)


def cpo(pairs: Pairs, options: spec.CpoLoss) -> Tensor:
    """-ls(b (pi_c - pi_r)) - alpha pi_c. Xu et al. 2024 (arXiv 2401.08417)."""
    return -logsigmoid(options.beta * (pairs.chosen.logp - pairs.rejected.logp)) - options.alpha * pairs.chosen.logp


def orpo(pairs: Pairs, options: spec.OrpoLoss) -> Tensor:
    """-pi_c / T_c - lambda ls(o_c - o_r), o = a - log(1 - exp(a)) the log-odds of a = pi / T, bounded below 0.

    Hong et al. 2024 (arXiv 2403.07691), eq. 6-7.
    """
    odds = _log_odds(pairs.chosen.mean) - _log_odds(pairs.rejected.mean)
    return -pairs.chosen.mean - options.lam * logsigmoid(odds)


def _log_odds(mean: Tensor) -> Tensor:
    bounded = mean.clamp(max=ALMOST_CERTAIN)
    return bounded - (-torch.expm1(bounded)).log()


LOSSES: dict[str, Callable[[Pairs, Any], Tensor]] = {
    "dpo": dpo,
    "robust": robust,
    "ipo": ipo,
    "hinge": hinge,
    "exo": exo,
    "discopop": discopop,
    "sppo": sppo,
    "nca": nca,
    "bco": bco,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
}
"""Losses of pairs by the kind of their block."""


def preference_loss(options: spec.PreferenceLossSpec, pairs: Pairs) -> Tensor:
    """[P] the loss of pairs that the block describes."""
    return LOSSES[options.kind](pairs, options)


def rewards(options: spec.PreferenceLossSpec, side: Completions) -> Tensor:
    """[P] the reward that a loss gives a completion: b u; without a reference b pi, for simpo and orpo of the mean log-prob."""
    if isinstance(options, spec.OrpoLoss):
        return options.lam * side.mean
    if isinstance(options, spec.SimpoLoss):
        return options.beta * side.mean
    return options.beta * (side.logp if isinstance(options, spec.CpoLoss) else side.log_ratio)


# -- single completions


def kto(log_ratio: Tensor, desirable: Tensor, z: Tensor, options: spec.KtoLoss) -> Tensor:
    """[S] w_D (1 - sig(b (u - z))) of desirable, w_U (1 - sig(b (z - u))) of other completions; z the mean mismatched u, at least 0.

    Args: `log_ratio` u [S]; `desirable` bool [S]; `z` [S] or a scalar, without gradient.
    Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 7.
    """
    x = options.beta * (log_ratio - z)
    good = options.desirable_weight * (1 - torch.sigmoid(x))
    bad = options.undesirable_weight * (1 - torch.sigmoid(-x))
    return torch.where(desirable, good, bad)
