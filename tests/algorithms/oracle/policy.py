"""Sections 2 to 5 of numerics.md: the policy objective of one step, from its trained tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.corrections import (
    GeometricMaskCorrection,
    IcePopCorrection,
    OffPolicyMaskCorrection,
    SequenceMaskCorrection,
    SequenceTisCorrection,
    TisCorrection,
)
from nemo_rl_like.spec.policy_losses import (
    SEQUENCE_LOSSES,
    CispoLoss,
    ClipCovLoss,
    ClipLoss,
    GmpoLoss,
    GpgLoss,
    GspoLoss,
    GspoTokenLoss,
    KlCovLoss,
    ReinforceLoss,
    SapoLoss,
    SequenceMeanTokenSumNorm,
)

from .samples import Sample, Tok, trained


@dataclass(frozen=True, slots=True)
class Row:
    """The trained tokens of one sequence, at least one."""

    sample: Sample
    toks: list[Tok]
    advantages: list[float]
    current: list[Tensor]
    entropy: list[Tensor]


Rows = list[Row]
Values = list[list[Tensor]]
"""A number for each trained token of each sequence; for a sequence loss one a sequence."""


def trained_rows(
    algorithm: AlgorithmSpec,
    samples: list[Sample],
    advantages: list[list[float]],
    current: list[list[Tensor]],
    entropy: list[list[Tensor]],
) -> Rows:
    """The sequences with T_i > 0; with `mask_truncated` a truncated sample has no trained token."""
    rows = []
    for i, sample in enumerate(samples):
        at = [] if algorithm.mask_truncated and sample.truncated else trained(sample)
        if at:
            toks, row_advantages = [sample.tokens[t] for t in at], [advantages[i][t] for t in at]
            rows.append(Row(sample, toks, row_advantages, [current[i][t] for t in at], [entropy[i][t] for t in at]))
    return rows


def objective(
    algorithm: AlgorithmSpec,
    samples: list[Sample],
    advantages: list[list[float]],
    current: list[list[Tensor]],
    entropy: list[list[Tensor]],
    max_new_tokens: int,
) -> Tensor:
    """aggregate(w * policy loss) + kl.coef * aggregate(w * k) - entropy_coef * aggregate(entropy) + positive_nll_coef * NLL."""
    rows = trained_rows(algorithm, samples, advantages, current, entropy)
    total = torch.zeros((), dtype=torch.float64, requires_grad=True) + 0.0
    if not rows:
        return total
    weights = correction_weights(algorithm, rows)
    total = total + aggregate(algorithm, policy_values(algorithm, rows, weights), max_new_tokens)
    if algorithm.kl.place == "loss" and algorithm.kl.coef > 0:
        total = total + algorithm.kl.coef * aggregate(algorithm, kl_values(algorithm, rows, weights), max_new_tokens)
    if algorithm.entropy_coef != 0:
        total = total - algorithm.entropy_coef * aggregate(algorithm, [row.entropy for row in rows], max_new_tokens)
    if algorithm.positive_nll_coef > 0:
        total = total + algorithm.positive_nll_coef * positive_nll(rows)
    return total


def policy_values(algorithm: AlgorithmSpec, rows: Rows, weights: list[list[float]]) -> Values:
    """Policy losses times correction weights (a sequence's value times the mean of its tokens' weights), top_entropy applied."""
    values = POLICY_LOSSES[algorithm.policy_loss.kind](algorithm.policy_loss, rows)
    if algorithm.policy_loss.kind in SEQUENCE_LOSSES:
        if algorithm.top_entropy is not None:
            raise ValueError(f"top_entropy: {algorithm.policy_loss.kind} has one value a sequence, not a token")
        return [[value[0] * fmean(weight)] for value, weight in zip(values, weights, strict=True)]
    if algorithm.top_entropy is not None:
        values = top_entropy(algorithm.top_entropy, rows, values)
    return times(values, weights)


def kl_values(algorithm: AlgorithmSpec, rows: Rows, weights: list[list[float]]) -> Values:
    """w * k(current - reference); unbiased: exp(current - behavior) * k(current - reference), all with gradient, without w."""
    estimator = KL_ESTIMATORS[algorithm.kl.estimator]
    values = [[estimator(c - tok.reference) for c, tok in zip(row.current, row.toks, strict=True)] for row in rows]
    if not algorithm.kl.unbiased:
        return times(values, weights)
    return [
        [torch.exp(c - tok.behavior) * k for c, tok, k in zip(row.current, row.toks, value, strict=True)]
        for row, value in zip(rows, values, strict=True)
    ]


def positive_nll(rows: Rows) -> Tensor:
    """Mean of -current over the trained tokens of samples with raw reward > 0; 0 if there are none."""
    tokens = [-c for row in rows if row.sample.reward > 0 for c in row.current]
    return total_of(tokens) / len(tokens) if tokens else constant(0.0)


def top_entropy(fraction: float, rows: Rows, values: Values) -> Values:
    """The max(1, floor(fraction * N)) tokens of highest entropy keep their loss; the others' is 0."""
    places = [(i, t) for i, row in enumerate(rows) for t in range(len(row.toks))]
    places.sort(key=lambda place: -rows[place[0]].entropy[place[1]].item())
    kept = set(places[: share(fraction, len(places))])
    return [[v if (i, t) in kept else constant(0.0) for t, v in enumerate(row)] for i, row in enumerate(values)]


# -- small parts


def constant(x: float) -> Tensor:
    """A number without gradient."""
    return torch.tensor(x, dtype=torch.float64)


def total_of(values: list[Tensor]) -> Tensor:
    """Sum of 0-d tensors."""
    total = constant(0.0)
    for value in values:
        total = total + value
    return total


def mean_of(values: list[Tensor]) -> Tensor:
    """Mean of 0-d tensors."""
    return total_of(values) / len(values)


def times(values: Values, weights: list[list[float]]) -> Values:
    """Each value times its weight."""
    return [[v * w for v, w in zip(*pair, strict=True)] for pair in zip(values, weights, strict=True)]


def share(fraction: float, n: int) -> int:
    """max(1, floor(fraction * N))."""
    return max(1, math.floor(fraction * n))


def smaller(a: Tensor, b: Tensor) -> Tensor:
    """min(a, b)."""
    return a if a.item() <= b.item() else b


def clipped(r: Tensor, low: float, high: float) -> Tensor:
    """clip(r, 1 - low, 1 + high); outside the band a constant."""
    if r.item() < 1 - low:
        return constant(1 - low)
    if r.item() > 1 + high:
        return constant(1 + high)
    return r


def ppo(r: Tensor, a: float, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A)."""
    return -smaller(r * a, clipped(r, low, high) * a)


def log_ratios(row: Row) -> list[Tensor]:
    """d_t = current - proximal."""
    return [c - tok.proximal for c, tok in zip(row.current, row.toks, strict=True)]


def ratios(row: Row) -> list[Tensor]:
    """r_t = exp(d_t)."""
    return [torch.exp(d) for d in log_ratios(row)]


def sequence_ratio(log_ratio: list[Tensor]) -> Tensor:
    """s = exp(mean_t d_t)."""
    return torch.exp(mean_of(log_ratio))


def per_token(rows: Rows, loss: Callable[[Tensor, float, Tensor], Tensor]) -> Values:
    """loss(r, A, current) of every token."""
    return [[loss(r, a, c) for r, a, c in zip(ratios(row), row.advantages, row.current, strict=True)] for row in rows]


# -- policy losses


def clip(spec: ClipLoss, rows: Rows) -> Values:
    """-min(min(r, delta) A, clip(r) A); for A < 0 never above -dual A."""

    def loss(r: Tensor, a: float, c: Tensor) -> Tensor:
        unclipped = r if spec.delta is None else smaller(r, constant(spec.delta))
        value = -smaller(unclipped * a, clipped(r, spec.low, spec.high) * a)
        if spec.dual is not None and a < 0:
            value = smaller(value, constant(-spec.dual * a))
        return value

    return per_token(rows, loss)


def reinforce(spec: ReinforceLoss, rows: Rows) -> Values:
    """-A current."""
    return per_token(rows, lambda r, a, c: -a * c)


def gspo(spec: GspoLoss, rows: Rows) -> Values:
    """-min(s A_i, clip(s) A_i), A_i the mean of the tokens' advantages; one value a sequence."""
    return [[ppo(sequence_ratio(log_ratios(row)), fmean(row.advantages), spec.low, spec.high)] for row in rows]


def gspo_token(spec: GspoTokenLoss, rows: Rows) -> Values:
    """-min(s_t A_t, clip(s_t) A_t), s_t = sg(s_i) exp(current - sg(current))."""
    values = []
    for row in rows:
        s = sequence_ratio(log_ratios(row)).detach()
        token_ratios = [s * torch.exp(c - c.detach()) for c in row.current]
        values.append([ppo(r, a, spec.low, spec.high) for r, a in zip(token_ratios, row.advantages, strict=True)])
    return values


def gmpo(spec: GmpoLoss, rows: Rows) -> Values:
    """-exp(mean_t d~) A_i, d~ = min(d, high) if A_i > 0 else max(d, -low); one value a sequence."""
    values = []
    for row in rows:
        a = fmean(row.advantages)
        if a > 0:
            bounded = [constant(spec.high) if d.item() > spec.high else d for d in log_ratios(row)]
        else:
            bounded = [constant(-spec.low) if d.item() < -spec.low else d for d in log_ratios(row)]
        values.append([-sequence_ratio(bounded) * a])
    return values


def cispo(spec: CispoLoss, rows: Rows) -> Values:
    """-sg(min(r, cap)) A current."""
    return per_token(rows, lambda r, a, c: -min(r.item(), spec.cap) * a * c)


def sapo_gate(r: Tensor, tau: float) -> Tensor:
    """f(r) = (4 / tau) sigmoid(tau (r - 1))."""
    return (4 / tau) / (1 + torch.exp(-tau * (r - 1)))


def sapo(spec: SapoLoss, rows: Rows) -> Values:
    """-f(r) A, tau by the sign of A."""
    return per_token(rows, lambda r, a, c: -sapo_gate(r, spec.tau_positive if a > 0 else spec.tau_negative) * a)


def gpg(spec: GpgLoss, rows: Rows) -> Values:
    """-A current alpha, alpha = groups with a trained token / groups with a nonzero advantage on one (0 if none)."""
    groups = {row.sample.group for row in rows}
    moving = {row.sample.group for row in rows if any(a != 0 for a in row.advantages)}
    alpha = len(groups) / len(moving) if moving else 0.0
    return per_token(rows, lambda r, a, c: -a * c * alpha)


def covariances(rows: Rows) -> list[list[float]]:
    """cov_t = (current_t - mean)(A_t - mean), both means over all trained tokens of the step."""
    mean_current = fmean(c.item() for row in rows for c in row.current)
    mean_advantage = fmean(a for row in rows for a in row.advantages)
    return [
        [(c.item() - mean_current) * (a - mean_advantage) for c, a in zip(row.current, row.advantages, strict=True)]
        for row in rows
    ]


def kl_cov(spec: KlCovLoss, rows: Rows) -> Values:
    """-r A; the max(1, floor(fraction N)) tokens of largest cov, as far as it is above 0: -r A + coef |current - proximal|."""
    cov = covariances(rows)
    places = [(i, t) for i, row in enumerate(rows) for t in range(len(row.toks))]
    places.sort(key=lambda place: -cov[place[0]][place[1]])
    values = per_token(rows, lambda r, a, c: -r * a)
    for i, t in places[: share(spec.fraction, len(places))]:
        if cov[i][t] <= 1e-8:  # 0 but for rounding
            continue
        values[i][t] = values[i][t] + spec.coef * torch.abs(log_ratios(rows[i])[t])
    return values


def ppo_clips(r: Tensor, a: float, low: float, high: float) -> bool:
    """PPO's rule leaves the token without gradient."""
    return (r.item() < 1 - low and a < 0) or (r.item() > 1 + high and a > 0)


def clip_cov(spec: ClipCovLoss, rows: Rows) -> Values:
    """PPO's clip loss; of the tokens with cov_low < cov < cov_high that PPO does not clip, the share with the smallest draw has loss 0."""
    cov = covariances(rows)
    eligible = []
    for i, row in enumerate(rows):
        for t, (r, a) in enumerate(zip(ratios(row), row.advantages, strict=True)):
            if spec.cov_low < cov[i][t] < spec.cov_high and not ppo_clips(r, a, spec.low, spec.high):
                eligible.append((i, t))
    eligible.sort(key=lambda place: rows[place[0]].toks[place[1]].draw)
    values = per_token(rows, lambda r, a, c: ppo(r, a, spec.low, spec.high))
    for i, t in eligible[: share(spec.fraction, sum(len(row.toks) for row in rows))]:
        values[i][t] = constant(0.0)
    return values


POLICY_LOSSES: dict[str, Callable[[Any, Rows], Values]] = {
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


# -- corrections: a weight for each token of a row, without gradient


def mismatch(row: Row) -> list[float]:
    """log w_t = proximal - behavior."""
    return [tok.proximal - tok.behavior for tok in row.toks]


def tis(spec: TisCorrection, row: Row) -> list[float]:
    """min(w, cap)."""
    return [min(math.exp(x), spec.cap) for x in mismatch(row)]


def icepop(spec: IcePopCorrection, row: Row) -> list[float]:
    """w inside [low, high], else 0."""
    return [math.exp(x) if spec.low <= math.exp(x) <= spec.high else 0.0 for x in mismatch(row)]


def sequence_tis(spec: SequenceTisCorrection, row: Row) -> list[float]:
    """min(prod_t w_t, cap), for every token."""
    return [min(math.exp(math.fsum(mismatch(row))), spec.cap)] * len(row.toks)


def sequence_mask(spec: SequenceMaskCorrection, row: Row) -> list[float]:
    """1 if low <= prod_t w_t <= high, else 0."""
    kept = spec.low <= math.exp(math.fsum(mismatch(row))) <= spec.high
    return [float(kept)] * len(row.toks)


def geometric_mask(spec: GeometricMaskCorrection, row: Row) -> list[float]:
    """1 if low <= exp(mean_t log w_t) <= high, else 0."""
    kept = spec.low <= math.exp(fmean(mismatch(row))) <= spec.high
    return [float(kept)] * len(row.toks)


def off_policy_mask(spec: OffPolicyMaskCorrection, row: Row) -> list[float]:
    """1 if mean A >= 0 or mean_t(behavior - current) <= delta, else 0."""
    distance = fmean(tok.behavior - c.item() for tok, c in zip(row.toks, row.current, strict=True))
    kept = fmean(row.advantages) >= 0 or distance <= spec.delta
    return [float(kept)] * len(row.toks)


CORRECTIONS: dict[str, Callable[[Any, Row], list[float]]] = {
    "tis": tis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
    "off_policy_mask": off_policy_mask,
}


def correction_weights(algorithm: AlgorithmSpec, rows: Rows) -> list[list[float]]:
    """The product of all corrections, for every token."""
    weights = [[1.0] * len(row.toks) for row in rows]
    for spec in algorithm.correction:
        for i, row in enumerate(rows):
            factors = CORRECTIONS[spec.kind](spec, row)
            weights[i] = [w * f for w, f in zip(weights[i], factors, strict=True)]
    return weights


# -- KL estimators, x = current - reference


def k1(x: Tensor) -> Tensor:
    """x."""
    return x


def k2(x: Tensor) -> Tensor:
    """x^2 / 2."""
    return x * x / 2


def k3(x: Tensor) -> Tensor:
    """exp(-x) - 1 + x."""
    return torch.exp(-x) - 1 + x


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


# -- aggregation: values of the sequences with T_i > 0 -> one number


def token_mean(spec: Any, values: Values, max_new_tokens: int) -> Tensor:
    """sum / N_tokens."""
    return mean_of([value for row in values for value in row])


def sequence_mean_token_mean(spec: Any, values: Values, max_new_tokens: int) -> Tensor:
    """(1 / N_seq) sum_i (1 / T_i) sum_t."""
    return mean_of([mean_of(row) for row in values])


def sequence_mean_token_sum(spec: Any, values: Values, max_new_tokens: int) -> Tensor:
    """sum / N_seq."""
    return mean_of([total_of(row) for row in values])


def sequence_mean_token_sum_norm(spec: SequenceMeanTokenSumNorm, values: Values, max_new_tokens: int) -> Tensor:
    """sum / (N_seq L_max)."""
    length = max_new_tokens if spec.length is None else spec.length
    return mean_of([total_of(row) for row in values]) / length


def sequence_mean(spec: Any, values: Values, max_new_tokens: int) -> Tensor:
    """(1 / N_seq) sum_i value_i; of a token quantity (KL, entropy) value_i is the mean over the sequence's tokens."""
    return mean_of([mean_of(row) for row in values])


AGGREGATIONS: dict[str, Callable[[Any, Values, int], Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
    "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
    "sequence_mean": sequence_mean,
}


def aggregate(algorithm: AlgorithmSpec, values: Values, max_new_tokens: int) -> Tensor:
    """The algorithm's aggregation."""
    return AGGREGATIONS[algorithm.aggregation.kind](algorithm.aggregation, values, max_new_tokens)
