"""The supervised objective."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_like.algorithms.objectives import CrossEntropy, Outputs

from .test_traps import batch_rows, row


def test_cross_entropy_is_the_mean_over_trained_tokens_of_the_step() -> None:
    batch = batch_rows([row([1, 0, 1, 1]), row([1, 1], episode=1)])
    objective, current = CrossEntropy(), torch.randn(batch.tokens.numel())
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
