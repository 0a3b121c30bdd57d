"""Section 8 of numerics.md: preference losses of one pair.

pi and ref are a completion's summed log-probs, c the chosen and r the rejected one, len their trained tokens;
u = pi - ref, h = u_c - u_r, b = options["beta"]. Options left out have the default that the page or the paper gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Number = Tensor | float
Options = dict[str, Any]


def number(x: Number) -> Tensor:
    """A float64 0-d tensor; a tensor keeps its gradient."""
    return torch.as_tensor(x, dtype=torch.float64)


def ls(x: Number) -> Tensor:
    """log sigmoid(x)."""
    return logsigmoid(number(x))


def sig(x: Number) -> Tensor:
    """sigmoid(x)."""
    return torch.sigmoid(number(x))


def beta(options: Options) -> float:
    """b, .1 by default."""
    return options.get("beta", 0.1)


def divergence_term(u: Number, options: Options) -> Tensor:
    """f'(exp(u)) up to a constant: reverse_kl u; forward_kl -exp(-u); js logsigmoid(u); alpha -exp(-a u)/a (2309.16240)."""
    kind = options.get("f_divergence", "reverse_kl")
    a = options.get("f_alpha", 1.0)
    terms: dict[str, Callable[[Tensor], Tensor]] = {
        "reverse_kl": lambda x: x,
        "forward_kl": lambda x: -torch.exp(-x),
        "js": ls,
        "alpha": lambda x: -torch.exp(-a * x) / a,
    }
    return terms[kind](number(u))


def difference(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, options: Options) -> Tensor:
    """h = (pi_c - ref_c) - (pi_r - ref_r), each log-ratio through the f-divergence."""
    return divergence_term(pi_c - ref_c, options) - divergence_term(pi_r - ref_r, options)


# -- losses on h


def dpo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """-(1 - e) logsig(b h) - e logsig(-b h), e = label_smoothing."""
    bh = beta(options) * difference(pi_c, pi_r, ref_c, ref_r, options)
    e = options.get("label_smoothing", 0.0)
    return -(1 - e) * ls(bh) - e * ls(-bh)


def robust(
    pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options
) -> Tensor:
    """[-(1 - e) logsig(b h) + e logsig(-b h)] / (1 - 2 e)."""
    bh = beta(options) * difference(pi_c, pi_r, ref_c, ref_r, options)
    e = options.get("label_smoothing", 0.0)
    return (-(1 - e) * ls(bh) + e * ls(-bh)) / (1 - 2 * e)


def ipo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """(h - 1/(2b))^2; logp_reduction mean (default): all four log-probs divided by their completion's length."""
    if options.get("logp_reduction", "mean") == "mean":
        pi_c, pi_r, ref_c, ref_r = pi_c / len_c, pi_r / len_r, ref_c / len_c, ref_r / len_r
    h = difference(pi_c, pi_r, ref_c, ref_r, options)
    return (h - 1 / (2 * beta(options))) ** 2


def hinge(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """relu(1 - b h)."""
    return torch.relu(1 - beta(options) * difference(pi_c, pi_r, ref_c, ref_r, options))


def exo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """q (log q - log(1-e)) + (1-q)(log(1-q) - log e), q = sig(b h), e = label_smoothing > 0."""
    e = options["label_smoothing"]
    bh = beta(options) * difference(pi_c, pi_r, ref_c, ref_r, options)
    return sig(bh) * (ls(bh) - math.log(1 - e)) + sig(-bh) * (ls(-bh) - math.log(e))


def discopop(
    pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options
) -> Tensor:
    """(1 - s)(-logsig(b h)) + s exp(-b h), s = sig(b h / .05)."""
    bh = beta(options) * difference(pi_c, pi_r, ref_c, ref_r, options)
    s = sig(bh / options.get("tau", 0.05))
    return (1 - s) * -ls(bh) + s * torch.exp(-bh)


def rpo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """dpo + alpha * (-pi_c / len_c)."""
    nll = -number(pi_c) / len_c
    return dpo(pi_c, pi_r, ref_c, ref_r, len_c, len_r, options) + options.get("alpha", 1.0) * nll


def xpo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """dpo + alpha * log pi(the completion that the reference sampled) (2405.21046)."""
    explored = number(pi_c if options["reference_is_chosen"] else pi_r)
    return dpo(pi_c, pi_r, ref_c, ref_r, len_c, len_r, options) + options["alpha"] * explored


# -- losses on u_c and u_r


def sppo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """(u_c - 1/(2b))^2 + (u_r + 1/(2b))^2."""
    half = 1 / (2 * beta(options))
    return (number(pi_c - ref_c) - half) ** 2 + (number(pi_r - ref_r) + half) ** 2


def nca(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """-logsig(b u_c) - .5 logsig(-b u_c) - .5 logsig(-b u_r)."""
    b, u_c, u_r = beta(options), pi_c - ref_c, pi_r - ref_r
    return -ls(b * u_c) - 0.5 * ls(-b * u_c) - 0.5 * ls(-b * u_r)


def bco(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """-logsig(b u_c - delta) - logsig(delta - b u_r), delta the running mean reward, given."""
    b, delta = beta(options), options.get("delta", 0.0)
    return -ls(b * (pi_c - ref_c) - delta) - ls(delta - b * (pi_r - ref_r))


def apo_zero(
    pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options
) -> Tensor:
    """1 - sig(b u_c) + sig(b u_r)."""
    b = beta(options)
    return 1 - sig(b * (pi_c - ref_c)) + sig(b * (pi_r - ref_r))


def apo_down(
    pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options
) -> Tensor:
    """sig(b u_c) + 1 - sig(b h)."""
    b, u_c, u_r = beta(options), pi_c - ref_c, pi_r - ref_r
    return sig(b * u_c) + 1 - sig(b * (u_c - u_r))


# -- losses without a reference


def simpo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """-logsig(b (pi_c / len_c - pi_r / len_r) - gamma), b 2, gamma 1."""
    return -ls(options.get("beta", 2.0) * (pi_c / len_c - pi_r / len_r) - options.get("gamma", 1.0))


def cpo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """-logsig(b (pi_c - pi_r)) + alpha NLL, NLL = -pi_c summed as in the paper (2401.08417)."""
    return -ls(beta(options) * (pi_c - pi_r)) + options.get("alpha", 1.0) * -number(pi_c)


def log1mexp(a: Tensor) -> Tensor:
    """log(1 - exp(a))."""
    return torch.log(1 - torch.exp(a))


def bounded_mean(pi: Number, length: int) -> Tensor:
    """a = pi / len, at most -1e-6."""
    mean = number(pi) / length
    return mean if mean.item() <= -1e-6 else number(-1e-6)


def orpo(pi_c: Number, pi_r: Number, ref_c: Number, ref_r: Number, len_c: int, len_r: int, options: Options) -> Tensor:
    """NLL_c - lambda logsig((a_c - a_r) - (log1mexp(a_c) - log1mexp(a_r))), NLL_c = -pi_c / len_c, lambda .1."""
    a_c, a_r = bounded_mean(pi_c, len_c), bounded_mean(pi_r, len_r)
    log_odds = (a_c - a_r) - (log1mexp(a_c) - log1mexp(a_r))
    return -number(pi_c) / len_c - options.get("lambda", 0.1) * ls(log_odds)


PREFERENCE_LOSSES: dict[str, Callable[[Number, Number, Number, Number, int, int, Options], Tensor]] = {
    "dpo": dpo,
    "robust": robust,
    "ipo": ipo,
    "hinge": hinge,
    "exo": exo,
    "discopop": discopop,
    "rpo": rpo,
    "xpo": xpo,
    "sppo": sppo,
    "nca": nca,
    "bco": bco,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "cpo": cpo,
    "orpo": orpo,
}


# -- losses and quantities that are no function of one pair's summed log-probs


def kto(
    log_ratios: list[Tensor] | list[float],
    mismatched: list[Tensor] | list[float],
    desirable: list[bool],
    options: Options,
) -> Tensor:
    """Mean of w_D (1 - sig(b(u - z))) or w_U (1 - sig(b(z - u))); z = max(0, mean of the mismatched log-ratios), no gradient."""
    if len(log_ratios) < 2:
        raise ValueError("kto: z needs at least two samples in the step")
    z = max(0.0, sum(number(x).item() for x in mismatched) / len(mismatched))
    b, total = beta(options), number(0.0)
    for u, good in zip(log_ratios, desirable, strict=True):
        if good:
            total = total + options.get("desirable_weight", 1.0) * (1 - sig(b * (u - z)))
        else:
            total = total + options.get("undesirable_weight", 1.0) * (1 - sig(b * (z - u)))
    return total / len(log_ratios)


def nash_md(pi: Number, ref: Number, preference: float, coef: float) -> Tensor:
    """-(P(y > y') - 1/2 - coef sg(pi - ref)) pi, y from the policy, y' from the mixture (2312.00886)."""
    log_ratio = number(pi).item() - number(ref).item()
    return -(preference - 0.5 - coef * log_ratio) * number(pi)


def ld_logprob(logprobs: list[Tensor] | list[float], other_length: int, alpha: float) -> Tensor:
    """ld_dpo: sum_{t <= l} log p_t + alpha sum_{t > l} log p_t, l the pair's shorter length (2409.06411); then dpo."""
    total = number(0.0)
    for t, x in enumerate(logprobs):
        total = total + (number(x) if t < other_length else alpha * number(x))
    return total


def wpo_weight(logprobs: tuple[list[float], list[float]], collisions: tuple[list[float], list[float]]) -> float:
    """min(1, w_c w_r), w = exp(mean_t(log p_t - log sum_v p(v)^2)), no gradient (2406.11827); multiplies the pair's loss."""
    exponent = 0.0
    for p, collision in zip(logprobs, collisions, strict=True):
        exponent += sum(x - c for x, c in zip(p, collision, strict=True)) / len(p)
    return min(1.0, math.exp(exponent))
