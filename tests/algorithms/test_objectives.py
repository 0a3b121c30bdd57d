"""The policy-gradient objective: value and gradient against a float64 loop, invariant to any split."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.algorithms import aggregation
from nemo_rl_like.algorithms.objectives import CrossEntropy, Outputs, PolicyGradient, with_advantages
from nemo_rl_like.tokens.batch import Row, batch_rows


def make_batch(lengths, seed=0, prompt=2, invalid=()):
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate(lengths):
        n = prompt + length
        mask = [False] * prompt + [bool(x) for x in torch.rand(length, generator=gen) < 0.8]
        ok = i not in invalid
        rows.append(
            Row(
                tokens=list(range(n)),
                prompt_len=prompt,
                loss_mask=mask if ok else [False] * n,
                behavior=[0.0] * n,
                version=[0] * n,
                prompt_id=i // 2,
                group_id=i // 2,
                episode_id=i,
                valid=ok,
                rewards={"reward": float(torch.rand(1, generator=gen)) if ok else float("nan")},
            )
        )
    batch = batch_rows(rows)
    n = batch.tokens.numel()
    draw = lambda scale: torch.randn(n, generator=gen) * scale - 2
    return batch.with_extras(proximal=draw(0.5), reference=draw(0.5), advantages=torch.randn(n, generator=gen)), draw(
        0.5
    )


def reference_loss(batch, current, objective):
    """The equation by loops in float64, with gradient through `current`."""
    rows = batch.row_of_token.tolist()
    mask = batch.loss_mask.tolist()
    counts = {}
    for row, live in zip(rows, mask, strict=True):
        counts[row] = counts.get(row, 0) + int(live)
    n_tokens, n_seq = sum(counts.values()), sum(c > 0 for c in counts.values())
    total = current.new_zeros(())
    for i, (row, live) in enumerate(zip(rows, mask, strict=True)):
        if not live:
            continue
        advantage = batch.extras["advantages"][i].double()
        ratio = (current[i] - batch.extras["proximal"][i].double()).exp()
        if objective.policy_loss == "reinforce":
            loss = -advantage * current[i]
        else:
            bounded = min(
                max(ratio, ratio.new_tensor(1 - objective.clip_low)), ratio.new_tensor(1 + objective.clip_high)
            )
            loss = -torch.minimum(ratio * advantage, bounded * advantage)
            if objective.dual_clip and advantage < 0:
                loss = torch.minimum(loss, -objective.dual_clip * advantage)
        if objective.kl_coef:
            x = current[i] - batch.extras["reference"][i].double()
            loss = loss + objective.kl_coef * (x * x / 2 if objective.kl_estimator == "k2" else (-x).exp() - 1 + x)
        divisor = {
            "token_mean": n_tokens,
            "sequence_mean_token_mean": n_seq * counts[row],
            "sequence_mean_token_sum": n_seq,
            "sequence_mean_token_sum_norm": n_seq * (objective.aggregation_length or 1),
        }[objective.aggregation]
        total = total + loss / divisor
    return total


def loss_over(batch, current, objective, parts):
    """Sum of the objective over micro-batches given as lists of token indices."""
    stats = objective.prepare(batch)
    total = current.new_zeros(())
    for part in parts:
        index = torch.tensor(part, dtype=torch.int64)
        values = {k: v[index].to(current.dtype) for k, v in stats.values.items()}
        entropy = torch.zeros(len(part), dtype=current.dtype)
        out = objective.loss(Outputs(current[index], entropy), values, stats.weights[index], stats)
        assert set(out.metrics) == set(objective.metric_names)
        total = total + out.loss
    return total


CHOICES = [
    PolicyGradient(
        policy_loss=loss, aggregation=agg, aggregation_length=11, kl_coef=coef, kl_estimator=est, dual_clip=dual
    )
    for loss, dual in (("clip", None), ("clip", 3.0), ("reinforce", None))
    for agg in aggregation.NAMES
    for coef, est in ((0.0, "k3"), (0.1, "k2"), (0.1, "k3"))
]


@pytest.mark.parametrize(
    "objective", CHOICES, ids=lambda o: f"{o.policy_loss}-{o.dual_clip}-{o.aggregation}-{o.kl_coef}-{o.kl_estimator}"
)
def test_value_and_gradient_equal_the_loop_reference_for_any_split(objective):
    batch, current = make_batch([3, 5, 1, 4, 2, 6], seed=3, invalid=(4,))
    trained = batch.loss_mask.nonzero()[:, 0].tolist()
    want_at = current.double().requires_grad_()
    want = reference_loss(batch, want_at, objective)
    want.backward()
    for parts in (
        [trained],
        [trained[::2], trained[1::2]],
        [[t] for t in reversed(trained)],
        [trained[:1], [], trained[1:]],
    ):
        got_at = current.double().requires_grad_()
        got = loss_over(batch, got_at, objective, parts)
        got.backward()
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(got_at.grad, want_at.grad, atol=1e-7, rtol=1e-5)


def test_token_mean_over_25_live_of_30_tokens_counts_25():
    mask = torch.tensor([True] * 25 + [False] * 5)
    weights = aggregation.token_weights("token_mean", mask, torch.zeros(30, dtype=torch.int64), 1)
    assert weights[:25].unique().tolist() == [pytest.approx(1 / 25)]
    assert weights[25:].abs().sum() == 0


def test_the_dr_grpo_divisor_does_not_move_with_padding():
    short = aggregation.token_weights(
        "sequence_mean_token_sum_norm", torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), 1, 16
    )
    padded_mask = torch.tensor([True] * 4 + [False] * 9)
    padded = aggregation.token_weights(
        "sequence_mean_token_sum_norm", padded_mask, torch.zeros(13, dtype=torch.int64), 1, 16
    )
    assert torch.equal(short, padded[:4])


def test_token_mean_worked_value():
    mask = torch.tensor([True, True] + [False] * 3 + [True] * 5)
    weights = aggregation.token_weights("token_mean", mask, torch.tensor([0] * 5 + [1] * 5), 2)
    values = torch.tensor([1.0, 1, 0, 0, 0, 4, 4, 4, 4, 4])
    assert (weights * values).sum() == pytest.approx(3.142857, abs=1e-6)


@pytest.mark.parametrize("name", aggregation.NAMES)
def test_an_all_masked_step_is_zero_and_finite(name):
    weights = aggregation.token_weights(name, torch.zeros(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int64), 1, 8)
    assert weights.tolist() == [0.0] * 6


@settings(max_examples=40, deadline=None)
@given(shift=st.floats(-50, 50), advantage=st.sampled_from([-1.5, 0.0, 2.0]))
def test_extreme_log_ratios_stay_finite_in_value_and_gradient(shift, advantage):
    current = torch.tensor([-1.0 + shift], requires_grad=True)
    objective = PolicyGradient(kl_coef=0.1)
    batch, _ = make_batch([1])
    stats = objective.prepare(batch)
    values = {
        "advantages": torch.tensor([advantage]),
        "proximal": torch.tensor([-1.0]),
        "reference": torch.tensor([-1.0]),
    }
    out = objective.loss(Outputs(current, torch.zeros(1)), values, torch.ones(1), stats)
    out.loss.backward()
    assert math.isfinite(out.loss.item()) and math.isfinite(current.grad.item())


def test_a_missing_reference_is_an_error_not_log_prob_zero():
    batch, _ = make_batch([2, 2])
    bare = with_advantages(batch_rows_of(batch), "grpo")
    with pytest.raises(ValueError, match="reference"):
        PolicyGradient(on_policy=True, kl_coef=0.1).prepare(bare)


def batch_rows_of(batch):
    from dataclasses import replace

    return replace(batch, extras={})


def test_on_policy_ratio_is_exactly_one_and_nothing_is_clipped():
    batch, current = make_batch([4, 4])
    objective = PolicyGradient(on_policy=True)
    stats = objective.prepare(batch)
    index = batch.loss_mask.nonzero()[:, 0]
    out = objective.loss(
        Outputs(current[index], torch.zeros(index.numel())),
        {k: v[index] for k, v in stats.values.items()},
        stats.weights[index],
        stats,
    )
    assert out.metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert out.metrics["clip_ratio/low_mean"] == out.metrics["clip_ratio/high_mean"] == 0
    assert out.metrics["approx_kl"] == 0


def test_segments_of_one_episode_count_once_in_their_group():
    mask = [False, True]
    rows = [
        Row([1, 2], 1, mask, [0.0] * 2, [0] * 2, prompt_id=p, group_id=0, episode_id=e, rewards={"reward": r})
        for p, e, r in ((0, 0, 1.0), (1, 0, 1.0), (2, 0, 1.0), (3, 1, 0.0))
    ]
    got = with_advantages(batch_rows(rows), "dr_grpo").extras["advantages"]
    assert got[batch_rows(rows).loss_mask].tolist() == [0.5, 0.5, 0.5, -0.5]


def test_cross_entropy_is_the_mean_over_trained_tokens():
    batch, current = make_batch([3, 4])
    objective = CrossEntropy()
    got = loss_over(batch, current, objective, [batch.loss_mask.nonzero()[:, 0].tolist()])
    assert got == pytest.approx(-current[batch.loss_mask].mean().item(), rel=1e-5)


def test_rows_of_zero_advantage_are_not_live_but_count_in_the_denominators():
    batch, _current = make_batch([3, 3, 3, 3])
    advantages = torch.where(batch.row_of_token < 2, torch.zeros(()), torch.ones(()))
    batch = batch.with_extras(advantages=advantages)
    stats = PolicyGradient(on_policy=True).prepare(batch)
    assert stats.live_rows.tolist() == [False, False, True, True]
    assert (stats.weights[batch.loss_mask] > 0).all()
    assert PolicyGradient(on_policy=True, entropy_coef=0.1).prepare(batch).live_rows.all()


def test_a_step_without_any_advantage_still_measures_every_row():
    batch, _ = make_batch([3, 3])
    batch = batch.with_extras(advantages=torch.zeros_like(batch.extras["advantages"]))
    assert PolicyGradient(on_policy=True).prepare(batch).live_rows.all()
