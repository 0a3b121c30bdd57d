"""The oracle itself: the values of numerics.md section 11, and small cases worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_rl_like.spec.algorithm import AlgorithmSpec

from . import distill, policy, preference, value
from .advantages import ADVANTAGES, advantages, pass_at_k_group, turn_returns, vapo_lambda
from .policy import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, objective
from .preference import PREFERENCE_LOSSES
from .samples import Sample, Tok
from .shaping import kept_groups, overlong_penalty, shaped

NAN = math.nan


def tok(**changes: Any) -> Tok:
    plain = Tok(True, -1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 1.0, 0.5, 0, 0)
    return replace(plain, **changes)


def sample(reward: float, tokens: list[Tok] | int = 1, group: int = 0, **changes: Any) -> Sample:
    toks = [tok() for _ in range(tokens)] if isinstance(tokens, int) else tokens
    return replace(Sample(group, True, reward, {}, 0.0, False, 0.0, 1000, toks), **changes)


def invalid(group: int = 0) -> Sample:
    return sample(NAN, [tok(trained=False)], group, valid=False)


def spec(**blocks: Any) -> AlgorithmSpec:
    return AlgorithmSpec(**blocks)


def first_advantages(algorithm: AlgorithmSpec, samples: list[Sample]) -> list[float]:
    return [row[0] for row in advantages(algorithm, samples).advantages]


def approx(x: Any, tolerance: float = 1e-9) -> Any:
    return pytest.approx(x, abs=tolerance)


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def numbers(rows: list[list[float]]) -> list[list[torch.Tensor]]:
    return [[number(x) for x in row] for row in rows]


def loss_of(
    algorithm: AlgorithmSpec, samples: list[Sample], adv: list[list[float]], current: list[list[float]]
) -> float:
    entropy = [[t.entropy for t in s.tokens] for s in samples]
    return objective(algorithm, samples, adv, numbers(current), numbers(entropy), 10).item()


# -- numerics section 11


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_group_relative_values(kind: str, expected: list[float]) -> None:
    samples = [sample(r) for r in (1.0, 0.0, 0.0, 0.0)]
    assert first_advantages(spec(advantage={"kind": kind}), samples) == approx(expected, 1e-5)


def test_gae_values() -> None:
    algorithm = spec(advantage={"kind": "gae", "whiten": False})
    result = advantages(algorithm, [sample(1.0, [tok(value=v) for v in (0.5, 0.6, 0.7)])])
    assert result.advantages[0] == approx([0.46575, 0.385, 0.3])
    assert result.returns[0] == approx([0.96575, 0.985, 1.0])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dpo", {}, 0.554355),
        ("dpo", {"label_smoothing": 0.1}, 0.584355),
        ("ipo", {"logp_reduction": "sum"}, 4.0),
        ("simpo", {}, 1.313262),
    ],
)
def test_preference_values(name: str, options: dict[str, Any], expected: float) -> None:
    loss = PREFERENCE_LOSSES[name](-10.0, -14.0, -11.0, -12.0, 5, 7, options)
    assert loss.item() == approx(expected, 5e-7)


def test_sapo_and_gspo_and_kl_values() -> None:
    assert policy.sapo_gate(number(0.5), 1.0).item() == approx(1.510163, 5e-7)
    assert policy.sapo_gate(number(1.0), 1.0).item() == approx(2.0)
    assert policy.sequence_ratio([number(d) for d in (0.2, -0.1, 0.3)]).item() == approx(1.142631, 5e-7)
    for kind, expected in (("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)):
        assert KL_ESTIMATORS[kind](number(0.5)).item() == approx(expected, 5e-7)


def test_reward_model_values() -> None:
    assert value.reward_model_loss(number(1.2), number(0.5)).item() == approx(0.403186, 5e-7)
    assert value.reward_model_loss(number(1.2), number(0.5), margin=0.3).item() == approx(0.513015, 5e-7)
    centered = value.reward_model_loss(number(1.2), number(0.5), center=0.1).item()
    assert centered == approx(0.403186 + 0.1 * 1.7**2, 5e-7)


def test_overlong_values() -> None:
    assert [overlong_penalty(y, 1000, 200) for y in (800, 900, 1000, 1100)] == [0.0, -0.5, -1.0, -1.0]
    algorithm = spec(shaping=[{"kind": "overlong", "cache": 4, "coef": 0.5}])
    assert shaped(algorithm, [sample(1.0, 8), sample(1.0, 3)], 10) == approx([0.75, 1.0])


def test_token_mean_value_in_any_order() -> None:
    values = numbers([[1.0, 1.0], [4.0] * 5])
    for rows in (values, values[::-1]):
        assert AGGREGATIONS["token_mean"](None, rows, 10).item() == approx(22 / 7)


# -- rules of section 0


def test_invalid_samples_are_in_no_count() -> None:
    rewards = (1.0, 0.0, 0.5)
    for kind in ADVANTAGES:
        if kind == "gdpo":
            continue
        algorithm = spec(advantage={"kind": kind})
        alone = first_advantages(algorithm, [sample(r, 2) for r in rewards])
        mixed = first_advantages(algorithm, [invalid(), *[sample(r, 2) for r in rewards], invalid(1)])
        assert mixed == [0.0, *alone, 0.0]


def test_equal_rewards_give_exactly_zero() -> None:
    for kind in ("grpo", "dr_grpo", "batch_std", "maxrl", "rloo", "opo", "pass_at_k", "gigpo"):
        samples = (
            [sample(0.3) for _ in range(7)] + [sample(1.0, group=1)] + [sample(float(i), group=2) for i in range(2)]
        )
        assert first_advantages(spec(advantage={"kind": kind}), samples)[:8] == [0.0] * 8


def test_untrained_tokens_change_nothing_but_their_places() -> None:
    toks = [tok(value=v) for v in (0.5, 0.6, 0.7)]
    tool = tok(trained=False, value=9.0, proximal=NAN, reference=NAN)
    for kind in ("gae", "vapo", "reinforce_pp"):
        algorithm = spec(advantage={"kind": kind, "gamma": 0.9}, kl={"coef": 0.1, "place": "reward", "estimator": "k1"})
        plain = advantages(algorithm, [sample(1.0, toks)]).advantages[0]
        spread = advantages(algorithm, [sample(1.0, [tool, toks[0], tool, toks[1], toks[2], tool])]).advantages[0]
        assert spread == [0.0, plain[0], 0.0, plain[1], plain[2], 0.0]


# -- advantages by hand


def test_group_estimators_by_hand() -> None:
    samples = [sample(2.0, 1), sample(0.0, 3), sample(5.0, 1, group=1), sample(1.0, 1, group=1)]
    std = math.sqrt((0 + 4 + 9 + 1) / 3)  # of 2, 0, 5, 1 around 2
    assert first_advantages(spec(advantage={"kind": "batch_std"}), samples) == approx(
        [x / (std + 1e-6) for x in (1, -1, 2, -2)]
    )
    assert first_advantages(spec(advantage={"kind": "maxrl"}), samples) == approx([1, -1, 2 / 3, -2 / 3])
    assert first_advantages(spec(advantage={"kind": "opo"}), samples) == approx([1.5, -0.5, 2, -2])
    with pytest.raises(ValueError, match="negative"):
        advantages(spec(advantage={"kind": "maxrl"}), [sample(-1.0), sample(1.0)])


def test_remax_and_shaping_by_hand() -> None:
    algorithm = spec(advantage={"kind": "remax"}, shaping=[{"kind": "scale", "factor": 3}, {"kind": "clip", "high": 2}])
    assert first_advantages(algorithm, [sample(1.0, greedy=0.5)]) == approx([1.5])
    stop = [{"kind": "stop_properly", "coef": 0.5}, {"kind": "length_penalty", "coef": 0.1, "free_tokens": 2}]
    assert shaped(spec(shaping=stop), [sample(1.0, 4, truncated=True), sample(1.0, 1)]) == approx([0.3, 1.0])
    assert shaped(spec(shaping=[{"kind": "stop_properly", "coef": -1}]), [sample(1.0, truncated=True)]) == [-1.0]
    assert kept_groups([sample(1.0), sample(0.0), invalid(), sample(1.0, group=1), invalid(1)]) == {0}


def test_pass_at_k_equals_the_binomial_form() -> None:
    n, c, k = 6, 2, 3
    w = n - c
    p = 1 - math.comb(w, k) / math.comb(n, k)
    sigma = math.sqrt(p * (1 - p))
    wrong = (1 - math.comb(w - 1, k - 1) / math.comb(n - 1, k - 1) - p) / sigma
    assert pass_at_k_group([1.0] * c + [0.0] * w, k) == approx([(1 - p) / sigma] * c + [wrong] * w)
    assert pass_at_k_group([1.0, 0.0], 3) == [0.0, 0.0]


def test_reinforce_pp_by_hand() -> None:
    kl = {"coef": 0.5, "place": "reward", "estimator": "k1"}
    algorithm = spec(advantage={"kind": "reinforce_pp", "gamma": 0.5}, kl=kl)
    result = first_advantages(algorithm, [sample(1.0, [tok(proximal=-1.0, reference=-1.2)]), sample(0.0)])
    assert result == approx([1.0, -1.0])  # returns .9 and 0: mean .45, std .45
    baseline = spec(advantage={"kind": "reinforce_pp_baseline"})
    assert first_advantages(baseline, [sample(1.0), sample(0.0), sample(7.0, group=1)]) == approx(
        [math.sqrt(1.5), -math.sqrt(1.5), 0.0]
    )


def test_vapo_lambdas_and_bootstrap() -> None:
    assert [vapo_lambda(0.05, n) for n in (10, 20, 40)] == approx([0.0, 0.0, 0.5])
    algorithm = spec(advantage={"kind": "vapo", "alpha": 1.0, "whiten": False, "bootstrap_truncated": True})
    cut = sample(1.0, [tok(value=0.5), tok(value=0.6)], truncated=True, bootstrap=0.4)
    result = advantages(algorithm, [cut])
    assert result.advantages[0] == approx([0.1 + 0.5 * 0.8, 0.8])  # lambda 1 - 1/2
    assert result.returns[0] == approx([1.4, 1.4])


def test_turn_rewards_stay_in_place_and_shaping_goes_last() -> None:
    toks = [tok(reward=1.0), tok(turn=1), tok(reward=2.0, turn=1), tok(turn=2)]
    algorithm = spec(advantage={"kind": "gae", "whiten": False}, shaping=[{"kind": "scale", "factor": 2}])
    lam = 0.95  # values are 0, so A is the lambda-discounted sum of the rewards 1, 0, 2, 3
    assert advantages(algorithm, [sample(3.0, toks)]).returns[0] == approx(
        [1 + 2 * lam**2 + 3 * lam**3, 2 * lam + 3 * lam**2, 2 + 3 * lam, 3]
    )


def test_turn_returns_are_discounted_per_turn() -> None:
    toks = [tok(reward=1.0), tok(turn=1), tok(turn=1, reward=2.0), tok(trained=False, turn=2), tok(turn=3, reward=4.0)]
    gigpo = AlgorithmSpec.model_validate({"advantage": {"kind": "gigpo", "gamma": 0.5}})
    assert turn_returns(gigpo, sample(7.0, toks), 9.0) == {0: 3.5, 1: 5.0, 3: 6.0}
    assert turn_returns(gigpo, sample(7.0, [tok(), tok(), tok(turn=1)]), 9.0) == {0: 4.5, 1: 9.0}


def test_gigpo_by_hand() -> None:
    def episode(first: float, second: float) -> Sample:
        toks = [tok(turn=0, anchor=7, reward=first), tok(turn=1, anchor=8), tok(turn=1, anchor=8, reward=second)]
        return sample(first + second, toks)

    algorithm = spec(advantage={"kind": "gigpo", "gamma": 0.5, "step_weight": 2.0})
    result = advantages(algorithm, [episode(1.0, 2.0), episode(1.0, 0.0)]).advantages
    z = math.sqrt(0.5)  # (x - mean) / std of two different values
    assert result[0] == approx([3 * z] * 3, 1e-5)
    assert result[1] == approx([-3 * z] * 3, 1e-5)
    without = advantages(
        algorithm, [sample(1.0, [tok(), tok(turn=1, anchor=1)]), sample(0.0, [tok(anchor=2)])]
    ).advantages
    assert without == [approx([z, z], 1e-5), approx([-z], 1e-5)]


def test_gdpo_by_hand() -> None:
    samples = [sample(0.0, parts={"a": a, "b": b}) for a, b in ((1.0, 5.0), (0.0, 5.0))]
    z = math.sqrt(0.5)
    for weights in ({}, {"a": 3.0}):
        assert first_advantages(spec(advantage={"kind": "gdpo", "weights": weights}), samples) == approx([z, -z], 1e-5)
    assert first_advantages(spec(advantage={"kind": "gdpo", "weights": {"b": 1.0}}), samples) == [0.0, 0.0]


def test_distillation_is_added_last() -> None:
    algorithm = spec(advantage={"kind": "grpo"}, distill_coef=0.5)
    result = advantages(algorithm, [sample(1.0, [tok(teacher=-0.6), tok(trained=False)]), sample(1.0)])
    assert result.advantages == [approx([0.2, 0.0]), approx([0.0])]


# -- policy objective by hand


def one_token(loss: dict[str, Any], ratio: float, advantage: float) -> float:
    return loss_of(spec(policy_loss=loss), [sample(1.0)], [[advantage]], [[-1.0 + math.log(ratio)]])


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "expected"),
    [
        ({"kind": "clip"}, 1.5, 2.0, -2.4),
        ({"kind": "clip"}, 0.5, 2.0, -1.0),
        ({"kind": "clip"}, 0.5, -2.0, 1.6),
        ({"kind": "clip"}, 5.0, -2.0, 10.0),
        ({"kind": "clip", "dual": 3.0}, 5.0, -2.0, 6.0),
        ({"kind": "clip", "delta": 2.0}, 5.0, -2.0, 4.0),
        ({"kind": "cispo"}, 2.0, 1.0, 2 * (1 - math.log(2))),
        ({"kind": "cispo", "cap": 1.5}, 2.0, 1.0, 1.5 * (1 - math.log(2))),
        ({"kind": "reinforce"}, 1.0, 2.0, 2.0),
        ({"kind": "gspo_token"}, 1.5, 2.0, -2.0008),
    ],
)
def test_token_losses_by_hand(loss: dict[str, Any], ratio: float, advantage: float, expected: float) -> None:
    assert one_token(loss, ratio, advantage) == approx(expected)


def test_clipping_stops_the_gradient() -> None:
    for ratio, expected in ((1.1, -1.1), (1.5, 0.0)):
        current = [[number(-1.0 + math.log(ratio))]]
        objective(spec(), [sample(1.0)], [[1.0]], current, numbers([[1.0]]), 10).backward()
        assert (0.0 if current[0][0].grad is None else current[0][0].grad.item()) == approx(expected)


def test_sequence_losses_by_hand() -> None:
    samples, current = [sample(1.0, 2), sample(0.0, 1)], [[-0.4, -1.0], [-1.0]]  # d = .6, 0 and 0
    gmpo = spec(policy_loss={"kind": "gmpo"}, aggregation={"kind": "sequence_mean"})
    assert loss_of(gmpo, samples, [[1.0, 1.0], [-1.0]], current) == approx((-math.exp(0.2) + 1) / 2)
    gspo = spec(policy_loss={"kind": "gspo"}, aggregation={"kind": "sequence_mean"})
    assert loss_of(gspo, samples, [[1.0, 1.0], [-1.0]], current) == approx((-1.0004 + 1) / 2)
    with pytest.raises(ValueError, match="top_entropy"):
        loss_of(gspo.model_copy(update={"top_entropy": 0.5}), samples, [[1.0, 1.0], [-1.0]], current)


def test_gpg_rescales_by_groups_with_a_gradient() -> None:
    samples = [sample(1.0), sample(0.0, group=1)]
    assert loss_of(spec(policy_loss={"kind": "gpg"}), samples, [[1.0], [0.0]], [[-1.0], [-1.0]]) == approx(1.0)


def test_covariance_losses_by_hand() -> None:
    samples, adv, current = [sample(1.0, 4)], [[2.0, -2.0, 0.0, 0.0]], [[-0.5, -1.5, -1.0, -1.0]]  # cov 1, 1, 0, 0
    plain = (-2 * math.exp(0.5) + 2 * math.exp(-0.5)) / 4
    one = spec(policy_loss={"kind": "kl_cov", "fraction": 0.1, "coef": 3.0})
    assert loss_of(one, samples, adv, current) == approx(plain + 3 * 0.5 / 4)
    none = spec(policy_loss={"kind": "clip_cov", "cov_low": 1.0})
    clipped = (-2 * 1.2 + 2 * 0.8) / 4
    assert loss_of(none, samples, adv, current) == approx(clipped)
    both_clipped = spec(policy_loss={"kind": "clip_cov", "cov_low": 0.5})
    assert loss_of(both_clipped, samples, adv, current) == approx(clipped)
    wide = spec(policy_loss={"kind": "clip_cov", "cov_low": 0.5, "high": 1.0})
    assert loss_of(wide, samples, adv, current) == approx(2 * 0.8 / 4)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({"kind": "tis"}, [2.0, 0.5]),
        ({"kind": "icepop", "high": 3.0}, [0.0, 0.5]),
        ({"kind": "sequence_tis"}, [2.0, 2.0]),
        ({"kind": "sequence_tis", "cap": 9.0}, [2.0, 2.0]),
        ({"kind": "sequence_mask", "high": 3.0}, [1.0, 1.0]),
        ({"kind": "sequence_mask", "high": 1.9}, [0.0, 0.0]),
        ({"kind": "geometric_mask"}, [0.0, 0.0]),
        ({"kind": "geometric_mask", "high": 1.5}, [1.0, 1.0]),
        ({"kind": "off_policy_mask"}, [1.0, 1.0]),
    ],
)
def test_corrections_by_hand(correction: dict[str, Any], weights: list[float]) -> None:
    samples = [sample(1.0, [tok(behavior=-1 - math.log(4)), tok(behavior=-1 + math.log(2))])]  # w = 4, .5
    loss = loss_of(spec(correction=[correction]), samples, [[1.0, 3.0]], [[-1.0, -1.0]])
    assert loss == approx(-(weights[0] + 3 * weights[1]) / 2)


def test_off_policy_mask_drops_bad_sequences_that_moved() -> None:
    algorithm = spec(correction=[{"kind": "off_policy_mask", "delta": 0.1}])
    assert loss_of(algorithm, [sample(1.0)], [[-1.0]], [[-1.05]]) == approx(math.exp(-0.05))
    assert loss_of(algorithm, [sample(1.0)], [[-1.0]], [[-1.15]]) == 0.0


def test_kl_in_the_loss() -> None:
    samples = [sample(1.0, [tok(reference=-1.5, behavior=-1.2)])]
    weight, k3 = math.exp(0.2), math.exp(-0.5) - 0.5
    correction = [{"kind": "tis"}]
    weighted = spec(kl={"coef": 2.0}, correction=correction)
    assert loss_of(weighted, samples, [[0.0]], [[-1.0]]) == approx(2 * weight * k3)
    algorithm = spec(kl={"coef": 2.0, "unbiased": True}, correction=correction)
    current = numbers([[-1.0]])
    loss = objective(algorithm, samples, [[0.0]], current, numbers([[1.0]]), 10)
    loss.backward()
    assert loss.item() == approx(2 * weight * k3)
    assert current[0][0].grad.item() == approx(2 * weight * (k3 + 1 - math.exp(-0.5)))


def test_entropy_terms_and_positive_nll() -> None:
    samples = [sample(1.0, [tok(entropy=3.0), tok(entropy=1.0)])]
    assert loss_of(spec(top_entropy=0.5), samples, [[1.0, 5.0]], [[-1.0, -1.0]]) == approx(-0.5)
    assert loss_of(spec(entropy_coef=0.1), samples, [[0.0, 0.0]], [[-1.0, -1.0]]) == approx(-0.2)
    both = [*samples, sample(0.0)]
    assert loss_of(spec(positive_nll_coef=0.1), both, [[0.0, 0.0], [0.0]], [[-1.0, -2.0], [-9.0]]) == approx(0.15)


def test_aggregations_and_mask_truncated() -> None:
    samples = [sample(1.0, 1), sample(1.0, 3), sample(1.0, 2, truncated=True), invalid()]
    adv, current = [[-4.0], [-1.0] * 3, [-9.0] * 2, [NAN]], [[-1.0], [-1.0] * 3, [-1.0] * 2, [NAN]]
    expected = {
        "token_mean": 7 / 4,
        "sequence_mean_token_mean": 5 / 2,
        "sequence_mean_token_sum": 7 / 2,
        "sequence_mean_token_sum_norm": 7 / 20,
    }
    for kind, loss in expected.items():
        assert loss_of(spec(aggregation={"kind": kind}, mask_truncated=True), samples, adv, current) == approx(loss)
    norm = spec(aggregation={"kind": "sequence_mean_token_sum_norm", "length": 7}, mask_truncated=True)
    assert loss_of(norm, samples, adv, current) == approx(0.5)
    assert loss_of(spec(), [invalid()], [[NAN]], [[NAN]]) == 0.0


def test_every_choice_has_a_finite_loss_and_gradient() -> None:
    toks = [tok(behavior=-1.1 - 0.1 * t, reference=-1.2, draw=0.1 * t) for t in range(4)]
    samples = [sample(1.0, toks), sample(0.0, toks[:2], group=1)]
    for kind in POLICY_LOSSES:
        aggregation = {"kind": "sequence_mean" if kind in ("gspo", "gmpo") else "token_mean"}
        for correction in CORRECTIONS:
            algorithm = spec(
                policy_loss={"kind": kind}, aggregation=aggregation, correction=[{"kind": correction}], kl={"coef": 0.1}
            )
            current = numbers([[-1.0, -1.1, -0.9, -1.3], [-1.0, -0.8]])
            entropy = numbers([[1.0] * 4, [2.0] * 2])
            loss = objective(algorithm, samples, [[1.0] * 4, [-1.0] * 2], current, entropy, 10)
            loss.backward()
            assert math.isfinite(loss.item())
            assert all(c.grad is not None and math.isfinite(c.grad.item()) for row in current for c in row)


# -- value, preference and distillation by hand


def test_value_loss_takes_the_larger_branch() -> None:
    assert value.value_loss(number(1.0), 0.0, 0.5, None).item() == approx(0.5)
    assert value.value_loss(number(1.0), 0.0, 0.5, 0.2).item() == approx(0.5)
    assert value.value_loss(number(1.0), 1.0, 0.5, 0.2).item() == approx(0.5 * 0.09)


def test_other_preference_losses_by_hand() -> None:
    def loss(name: str, **options: Any) -> float:
        return PREFERENCE_LOSSES[name](-10.0, -14.0, -11.0, -12.0, 5, 7, options).item()  # u = 1, -2; h = 3

    def sig(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    dpo, q = -math.log(sig(0.3)), sig(0.3)
    assert loss("robust", label_smoothing=0.1) == approx((0.9 * dpo + 0.1 * math.log(sig(-0.3))) / 0.8)
    assert loss("ipo") == approx((1 / 5 + 2 / 7 - 5) ** 2)
    assert loss("hinge") == approx(0.7)
    assert loss("sppo") == approx(16 + 9)
    assert loss("nca") == approx(-math.log(sig(0.1)) - 0.5 * math.log(sig(-0.1)) - 0.5 * math.log(sig(0.2)))
    assert loss("bco", delta=0.2) == approx(-math.log(sig(-0.1)) - math.log(sig(0.4)))
    assert loss("apo_zero") == approx(1 - sig(0.1) + sig(-0.2))
    assert loss("apo_down") == approx(sig(0.1) + 1 - q)
    assert loss("exo", label_smoothing=0.1) == approx(q * math.log(q / 0.9) + (1 - q) * math.log((1 - q) / 0.1))
    assert loss("discopop") == approx((1 - sig(6)) * dpo + sig(6) * math.exp(-0.3))
    assert loss("cpo", alpha=0.5) == approx(-math.log(sig(0.4)) + 5)
    odds = math.log(1 - math.exp(-2))
    assert loss("orpo") == approx(2 - 0.1 * math.log(sig((-2 + 2) - (odds - odds))))
    assert loss("rpo", alpha=0.5) == approx(dpo + 1)
    assert loss("xpo", alpha=0.1, reference_is_chosen=False) == approx(dpo - 1.4)
    assert loss("dpo", f_divergence="alpha") == approx(loss("dpo", f_divergence="forward_kl"))
    assert loss("dpo", f_divergence="js") == approx(-math.log(sig(0.1 * math.log(sig(1) / sig(-2)))))


def test_kto_nash_md_ld_dpo_and_wpo_by_hand() -> None:
    def sig(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    loss = preference.kto([1.0, -2.0], [3.0, -1.0], [True, False], {"undesirable_weight": 2.0}).item()
    assert loss == approx((1 - sig(0.1 * (1 - 1)) + 2 * (1 - sig(0.1 * (1 + 2)))) / 2)
    assert preference.kto([1.0, -2.0], [-3.0, -1.0], [True, True], {}).item() == approx(1 - (sig(0.1) + sig(-0.2)) / 2)
    assert preference.nash_md(-3.0, -2.0, 0.75, 0.1).item() == approx(-(0.25 + 0.1) * -3)
    assert preference.ld_logprob([-1.0, -2.0, -4.0], 2, 0.5).item() == approx(-5)
    assert preference.wpo_weight(([-1.0], [-2.0, -4.0]), ([-0.5], [-1.0, -1.0])) == approx(math.exp(-0.5 - 2))


def test_gkd_by_hand() -> None:
    student, teacher = [0.0, 0.0], [math.log(3), 0.0]  # (.5, .5) and (.75, .25)
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    backward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2)
    assert distill.gkd(student, teacher, 0.0).item() == approx(forward)
    assert distill.gkd(student, teacher, 1.0).item() == approx(backward)
    half = 0.5 * (0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375))
    half += 0.5 * 0.5 * (math.log(0.5 / 0.625) + math.log(0.5 / 0.375))
    assert distill.gkd(student, teacher, 0.5).item() == approx(half)
    assert distill.gkd(student, [2 * z for z in teacher], 0.0, temperature=2.0).item() == approx(forward)
    assert distill.gkd_top_k([0.0] * 4, [math.log(9), 0.0, 0.0, 0.0], [0], 0.0).item() == approx(
        0.75 * math.log(3) + 0.25 * math.log(1 / 3)
    )
