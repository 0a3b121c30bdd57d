"""The supervised objective."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.algorithms.objectives import CrossEntropy, Outputs

from .oracle.supervised import cross_entropy
from .test_traps import batch_rows, row


def test_cross_entropy_is_the_mean_over_trained_tokens_of_the_step() -> None:
    batch = batch_rows([row([1, 0, 1, 1]), row([1, 1], episode=1)])
    objective, current = CrossEntropy(), -torch.rand(batch.tokens.numel())  # log-probs: nothing cancels in their sum
    stats = objective.prepare(batch)
    trained = batch.loss_mask.nonzero()[:, 0]
    parts = [objective.loss(Outputs(current[i]), {}, stats.weights[i], stats).loss for i in trained.split(2)]
    assert float(sum(parts)) == pytest.approx(float(-current[trained].mean()), rel=1e-6)


def test_dft_weighs_each_token_by_its_probability_without_gradient_through_it() -> None:
    batch = batch_rows([row([1, 0, 1, 1]), row([1, 1], episode=1)])
    objective, trained = CrossEntropy(dynamic=True), batch.loss_mask.nonzero()[:, 0]
    current = (-torch.rand(trained.numel(), dtype=torch.float64) * 3).requires_grad_()
    stats = objective.prepare(batch)
    weights = stats.weights[trained].double()
    out = objective.loss(Outputs(current), {}, weights, stats)
    out.loss.backward()
    probability = current.detach().exp()
    assert float(out.loss.detach()) == pytest.approx(float((-probability * current.detach()).mean()))
    assert float(out.metrics["nll"]) == pytest.approx(float(-current.detach().mean()))
    torch.testing.assert_close(current.grad, -probability / trained.numel(), atol=1e-9, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=9).filter(any),
    z_loss=st.sampled_from([0.0, 1e-2, 1.0]),
    cut=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_weights_and_z_loss_equal_the_oracle_in_value_and_gradient_for_any_split(
    weights: list[float], z_loss: float, cut: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([False, *(w > 0 for w in weights)])
    batch = batch_rows([row([int(m) for m in mask.tolist()[1:]])])
    first = batch.tokens.numel() - len(weights)
    extra = torch.zeros(batch.tokens.numel())
    extra[first:] = torch.tensor(weights)
    batch = replace(batch, extras={"weight": extra})
    logits = torch.randn(len(weights), 5, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(5, (len(weights),), generator=generator)
    objective = CrossEntropy(z_loss=z_loss)
    stats = objective.prepare(batch)
    trained = [i for i, weight in enumerate(weights) if weight > 0]
    total = torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(objective.metric_names, 0.0)
    for part in torch.tensor(trained).split(cut):
        log_norm = logits[part].logsumexp(-1)
        logprobs = logits[part].gather(1, targets[part, None])[:, 0] - log_norm
        made = objective.loss(Outputs(logprobs, log_norm=log_norm), {}, stats.weights[first + part].double(), stats)
        total = total + made.loss
        for name, value in made.metrics.items():
            sums[name] += float(value)
    want = cross_entropy(logits.tolist(), targets.tolist(), weights, z_loss)
    assert float(total.detach()) == pytest.approx(want, rel=1e-6)
    assert sums["nll"] == pytest.approx(cross_entropy(logits.tolist(), targets.tolist(), weights, 0.0), rel=1e-6)
    assert sums["loss"] == pytest.approx(sums["nll"] + sums.get("z_loss", 0.0), rel=1e-6)
    total.backward()
    assert logits.grad is not None
    table, step = logits.tolist(), 1e-5
    for t, v in ((0, 0), (len(weights) - 1, 3)):
        sides = []
        for sign in (1, -1):
            moved = [list(r) for r in table]
            moved[t][v] += sign * step
            sides.append(cross_entropy(moved, targets.tolist(), weights, z_loss))
        assert float(logits.grad[t, v]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-6)


def test_weights_of_one_are_no_weights_and_a_step_without_weight_is_refused() -> None:
    batch = batch_rows([row([1, 0, 1, 1]), row([1, 1], episode=1)])
    ones = replace(batch, extras={"weight": torch.ones(batch.tokens.numel())})
    torch.testing.assert_close(CrossEntropy().prepare(ones).weights, CrossEntropy().prepare(batch).weights)
    nothing = replace(batch, extras={"weight": torch.zeros(batch.tokens.numel())})
    with pytest.raises(ValueError, match="no trained token of the step has a weight"):
        CrossEntropy().prepare(nothing)
