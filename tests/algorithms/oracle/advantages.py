"""Section 1 of numerics.md: advantages and the critic's returns.

Every estimator takes the algorithm, the samples and their shaped rewards. Recursions, lengths, means and sums see trained tokens only;
the result has a number for every token, 0 where it is not trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pvariance, stdev

from nemo_rl_like.spec.algorithm import AlgorithmSpec

from .samples import Sample, trained, trained_tokens, valid_groups
from .shaping import shaped

EPS = 1e-6
VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class Result:
    """One list a sample, one number a token."""

    advantages: list[list[float]]
    returns: list[list[float]]
    """The critic's targets; 0 for estimators without a critic."""


def advantages(algorithm: AlgorithmSpec, samples: list[Sample], max_new_tokens: int | None = None) -> Result:
    """The algorithm's estimator on the shaped rewards, then opd's A_t += coef * (teacher - proximal)."""
    rewards = shaped(algorithm, samples, max_new_tokens)
    result = ADVANTAGES[algorithm.advantage.kind](algorithm, samples, rewards)
    if algorithm.distill_coef > 0:
        for i, sample in enumerate(samples):
            for t in trained(sample):
                tok = sample.tokens[t]
                result.advantages[i][t] += algorithm.distill_coef * (tok.teacher - tok.proximal)
    return result


# -- from numbers of samples or of trained tokens to numbers of tokens


def put_back(samples: list[Sample], rows: list[list[float]]) -> list[list[float]]:
    """Rows of the trained tokens alone -> rows of all tokens, 0 at the others."""
    full = [[0.0] * len(sample.tokens) for sample in samples]
    for i, sample in enumerate(samples):
        for t, value in zip(trained(sample), rows[i], strict=True):
            full[i][t] = value
    return full


def broadcast(samples: list[Sample], values: list[float]) -> Result:
    """One value a sample, at each of its trained tokens."""
    rows = [[value] * len(trained(sample)) for sample, value in zip(samples, values, strict=True)]
    return Result(put_back(samples, rows), put_back(samples, [[0.0] * len(row) for row in rows]))


# -- the rewards that enter the estimators


def kl_reward(algorithm: AlgorithmSpec, sample: Sample) -> list[float]:
    """-coef * k1_t at each trained token, k1_t = proximal - reference; 0 unless the KL is taken from the reward."""
    if algorithm.kl.place != "reward" or algorithm.kl.coef == 0:
        return [0.0] * len(trained(sample))
    return [-algorithm.kl.coef * (tok.proximal - tok.reference) for tok in trained_tokens(sample)]


def episode_rewards(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> list[float]:
    """R - coef * sum_t k1_t."""
    return [reward + sum(kl_reward(algorithm, sample)) for sample, reward in zip(samples, rewards, strict=True)]


def token_rewards(algorithm: AlgorithmSpec, sample: Sample, score: float) -> list[float]:
    """R_t of each trained token: the score on the last one, or turn rewards in place and score - raw on the last one; then -coef * k1_t."""
    toks = trained_tokens(sample)
    if not toks:
        return []
    rewards = [0.0] * len(toks)
    if any(tok.reward != 0 for tok in sample.tokens):
        rewards = [tok.reward for tok in toks]
        rewards[-1] += score - sample.reward
    else:
        rewards[-1] = score
    return [reward + kl for reward, kl in zip(rewards, kl_reward(algorithm, sample), strict=True)]


# -- group-relative estimators


def no_spread(values: list[float]) -> bool:
    """Rule 3 of section 0: fewer than two, or max = min."""
    return len(values) < 2 or max(values) == min(values)


def per_group(
    samples: list[Sample], rewards: list[float], estimate: Callable[[list[int], list[float]], list[float]]
) -> list[float]:
    """`estimate(members, their rewards)` of each group's valid samples; 0 in groups without spread and for invalid samples."""
    values = [0.0] * len(samples)
    for members in valid_groups(samples).values():
        group = [rewards[i] for i in members]
        if no_spread(group):
            continue
        for i, value in zip(members, estimate(members, group), strict=True):
            values[i] = value
    return values


def standardized(members: list[int], group: list[float]) -> list[float]:
    """(R - mean) / (std + 1e-6), std with K - 1."""
    return [(r - fmean(group)) / (stdev(group) + EPS) for r in group]


def grpo(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """(R - mean_g) / (std_g + 1e-6)."""
    return broadcast(samples, per_group(samples, episode_rewards(algorithm, samples, rewards), standardized))


def dr_grpo(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """R - mean_g."""

    def estimate(members: list[int], group: list[float]) -> list[float]:
        return [r - fmean(group) for r in group]

    return broadcast(samples, per_group(samples, episode_rewards(algorithm, samples, rewards), estimate))


def batch_std(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """(R - mean_g) / (std over the batch's valid samples + 1e-6), std with n - 1."""
    scores = episode_rewards(algorithm, samples, rewards)
    batch = [score for sample, score in zip(samples, scores, strict=True) if sample.valid]
    std = stdev(batch) if len(batch) >= 2 else 0.0

    def estimate(members: list[int], group: list[float]) -> list[float]:
        return [(r - fmean(group)) / (std + EPS) for r in group]

    return broadcast(samples, per_group(samples, scores, estimate))


def maxrl(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """(R - mean_g) / mean_g; 0 where mean_g = 0; a negative reward is refused."""
    scores = episode_rewards(algorithm, samples, rewards)
    if any(sample.valid and score < 0 for sample, score in zip(samples, scores, strict=True)):
        raise ValueError("maxrl: a reward is negative; rewards must be at least 0")

    def estimate(members: list[int], group: list[float]) -> list[float]:
        mean = fmean(group)
        return [(r - mean) / mean if mean != 0 else 0.0 for r in group]

    return broadcast(samples, per_group(samples, scores, estimate))


def rloo(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """R - (sum_g R - R) / (K - 1)."""

    def estimate(members: list[int], group: list[float]) -> list[float]:
        return [r - (sum(group) - r) / (len(group) - 1) for r in group]

    return broadcast(samples, per_group(samples, episode_rewards(algorithm, samples, rewards), estimate))


def opo(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """R - sum(T * R) / sum(T) over the group."""

    def estimate(members: list[int], group: list[float]) -> list[float]:
        lengths = [len(trained(samples[i])) for i in members]
        if sum(lengths) == 0:
            return [0.0] * len(group)
        baseline = sum(n * r for n, r in zip(lengths, group, strict=True)) / sum(lengths)
        return [r - baseline for r in group]

    return broadcast(samples, per_group(samples, episode_rewards(algorithm, samples, rewards), estimate))


def pass_at_k_group(group: list[float], k: int) -> list[float]:
    """(mean over the k-subsets that contain the sample of [any right] - P) / sqrt(P (1 - P)), P the mean over all k-subsets."""
    n = len(group)
    if n < k:
        return [0.0] * n
    best = {subset: float(any(group[i] > 0 for i in subset)) for subset in itertools.combinations(range(n), k)}
    p = fmean(best.values())
    sigma = math.sqrt(p * (1 - p))
    if sigma == 0:
        return [0.0] * n
    return [(fmean(value for subset, value in best.items() if i in subset) - p) / sigma for i in range(n)]


def pass_at_k(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """Advantage of the best of k, over all k-subsets of the group's valid samples."""

    def estimate(members: list[int], group: list[float]) -> list[float]:
        return pass_at_k_group(group, algorithm.advantage.k)

    return broadcast(samples, per_group(samples, episode_rewards(algorithm, samples, rewards), estimate))


# -- gigpo


def turn_returns(algorithm: AlgorithmSpec, sample: Sample, score: float) -> dict[int, float]:
    """G_t = sum_{s>=t} gamma^(s-t) r_s over the turns with a trained token, r_s the sum of the turn's token rewards."""
    rewards: dict[int, float] = {}
    for tok, reward in zip(trained_tokens(sample), token_rewards(algorithm, sample, score), strict=True):
        rewards[tok.turn] = rewards.get(tok.turn, 0.0) + reward
    returns = {}
    following = 0.0
    for turn in sorted(rewards, reverse=True):
        following = rewards[turn] + algorithm.advantage.gamma * following
        returns[turn] = following
    return returns


def step_groups(samples: list[Sample]) -> list[list[tuple[int, int]]]:
    """Turns (sample, turn) of valid samples with the same group and anchor."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, sample in enumerate(samples):
        anchors = {tok.turn: tok.anchor for tok in trained_tokens(sample)}
        for turn, anchor in anchors.items():
            groups.setdefault((sample.group, anchor), []).append((i, turn))
    return list(groups.values())


def gigpo(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """grpo of the episode + step_weight * (G - mean) / (std + 1e-6) of the turn in its step group."""
    scores = episode_rewards(algorithm, samples, rewards)
    episode = per_group(samples, scores, standardized)
    spec = algorithm.advantage
    returns = [turn_returns(algorithm, sample, score) for sample, score in zip(samples, rewards, strict=True)]
    step: dict[tuple[int, int], float] = {}
    for members in step_groups(samples):
        group = [returns[i][turn] for i, turn in members]
        values = [0.0] * len(group) if no_spread(group) else standardized([], group)
        step.update(zip(members, values, strict=True))
    rows = []
    for i, sample in enumerate(samples):
        rows.append([episode[i] + spec.step_weight * step[i, tok.turn] for tok in trained_tokens(sample)])
    return Result(put_back(samples, rows), put_back(samples, [[0.0] * len(row) for row in rows]))


# -- gdpo


def gdpo(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """Each part normalised in its group, weighted sum, then x / (std + 1e-6) over the batch's valid samples.

    The batch mean of x is 0, since that of each group is; subtracting its rounding error would move groups without spread off 0.
    """
    weights = algorithm.advantage.weights
    valid = [i for i, sample in enumerate(samples) if sample.valid]
    names = weights or dict.fromkeys(sorted({name for i in valid for name in samples[i].parts}), 1.0)
    total = [0.0] * len(samples)
    for name, weight in names.items():
        part = [sample.parts[name] if sample.valid else math.nan for sample in samples]
        for i, value in enumerate(per_group(samples, part, standardized)):
            total[i] += weight * value
    std = stdev(total[i] for i in valid) if len(valid) >= 2 else 0.0
    values = [x / (std + EPS) for x in total]
    return broadcast(samples, values)


# -- estimators that do not compare samples


def reinforce(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """R."""
    return broadcast(samples, episode_rewards(algorithm, samples, rewards))


def remax(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """R - R(greedy)."""
    scores = episode_rewards(algorithm, samples, rewards)
    return broadcast(samples, [score - sample.greedy for sample, score in zip(samples, scores, strict=True)])


# -- token-level estimators


def whiten(rows: list[list[float]]) -> list[list[float]]:
    """(x - mean) / sqrt(max(var, 1e-8)) over all trained tokens, var divided by N."""
    tokens = [x for row in rows for x in row]
    if not tokens:
        return rows
    mean = fmean(tokens)
    std = math.sqrt(max(pvariance(tokens), VARIANCE_FLOOR))
    return [[(x - mean) / std for x in row] for row in rows]


def discounted(rewards: list[float], gamma: float) -> list[float]:
    """G_t = sum_{s>=t} gamma^(s-t) R_s."""
    n = len(rewards)
    return [sum(gamma ** (s - t) * rewards[s] for s in range(t, n)) for t in range(n)]


def reinforce_pp(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """(G - mu) / sigma over all trained tokens, G the discounted token rewards."""
    rows = []
    for sample, score in zip(samples, rewards, strict=True):
        rows.append(discounted(token_rewards(algorithm, sample, score), algorithm.advantage.gamma))
    return Result(put_back(samples, whiten(rows)), put_back(samples, [[0.0] * len(row) for row in rows]))


def reinforce_pp_baseline(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """reinforce_pp on R - mean_g (valid samples)."""
    scores = list(rewards)
    for members in valid_groups(samples).values():
        mean = fmean(rewards[i] for i in members)
        for i in members:
            scores[i] = rewards[i] - mean
    return reinforce_pp(algorithm, samples, scores)


def gae_tokens(rewards: list[float], values: list[float], last: float, gamma: float, lam: float) -> list[float]:
    """delta_t = R_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; `last` is V after the last token."""
    result = [0.0] * len(rewards)
    following_value, following_advantage = last, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following_value - values[t]
        result[t] = delta + gamma * lam * following_advantage
        following_value, following_advantage = values[t], result[t]
    return result


def gae_samples(
    algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float], lam: Callable[[int], float]
) -> list[list[float]]:
    """GAE of each sample's trained tokens, with lam(T_i), before whitening."""
    spec = algorithm.advantage
    rows = []
    for sample, score in zip(samples, rewards, strict=True):
        values = [tok.value for tok in trained_tokens(sample)]
        last = sample.bootstrap if spec.bootstrap_truncated and sample.truncated else 0.0
        rows.append(gae_tokens(token_rewards(algorithm, sample, score), values, last, spec.gamma, lam(len(values))))
    return rows


def plus_values(samples: list[Sample], rows: list[list[float]]) -> list[list[float]]:
    """returns = A + V."""
    return [
        [a + tok.value for a, tok in zip(row, trained_tokens(sample), strict=True)]
        for sample, row in zip(samples, rows, strict=True)
    ]


def gae(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """GAE(lam); returns from the same, before whitening."""
    rows = gae_samples(algorithm, samples, rewards, lambda length: algorithm.advantage.lam)
    policy = whiten(rows) if algorithm.advantage.whiten else rows
    return Result(put_back(samples, policy), put_back(samples, plus_values(samples, rows)))


def vapo_lambda(alpha: float, length: int) -> float:
    """max(0, 1 - 1 / (alpha * T_i))."""
    return max(0.0, 1 - 1 / (alpha * length)) if length else 0.0


def vapo(algorithm: AlgorithmSpec, samples: list[Sample], rewards: list[float]) -> Result:
    """Policy: GAE(max(0, 1 - 1 / (alpha T_i))); critic's returns: GAE(1) + V, before whitening."""
    rows = gae_samples(algorithm, samples, rewards, lambda length: vapo_lambda(algorithm.advantage.alpha, length))
    critic = gae_samples(algorithm, samples, rewards, lambda length: 1.0)
    policy = whiten(rows) if algorithm.advantage.whiten else rows
    return Result(put_back(samples, policy), put_back(samples, plus_values(samples, critic)))


ADVANTAGES: dict[str, Callable[[AlgorithmSpec, list[Sample], list[float]], Result]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "batch_std": batch_std,
    "maxrl": maxrl,
    "rloo": rloo,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "gigpo": gigpo,
    "gdpo": gdpo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "gae": gae,
    "vapo": vapo,
}
