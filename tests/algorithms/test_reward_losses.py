"""The contract of reward models' losses: value, gradient and metrics equal to the float64 oracle, for every split and order."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_like.algorithms.reward_losses import objective_of, pairwise
from nemo_rl_like.spec.reward_model import PairwiseReward, ProcessReward, RegressionReward, RewardLossSpec
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows
from nemo_rl_like.tokens.scored import scored_row

from .oracle import value as oracle
from .passes import made, splits, with_metrics

PAIRS = [PairwiseReward(), PairwiseReward(margin_weight=0.7), PairwiseReward(center=0.01, margin_weight=1.0)]
TARGETS: list[RewardLossSpec] = [RegressionReward(), ProcessReward()]


def pair_batch(seed: int, count: int = 5) -> TokenBatch:
    """Pairs of rows of different lengths; the rows of a pair share their prompt, and stand apart in the batch."""
    draw = random.Random(seed)
    rows = []
    for group in range(count):
        prompt, margin = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))], draw.uniform(0, 1)
        for chosen in (1.0, 0.0):
            tokens = prompt + [draw.randint(1, 9) for _ in range(draw.randint(1, 4))]
            ids = {"prompt_id": group, "group_id": 10 + group, "episode_id": 2 * group + int(chosen)}
            columns = {"chosen": chosen, "margin": margin}
            rows.append(scored_row(tokens, [len(tokens) - 1], prompt_len=len(prompt), columns=columns, **ids))
    draw.shuffle(rows)
    return batch_rows(rows)


def target_batch(seed: int, *, binary: bool) -> TokenBatch:
    """Rows with one to four scored places each, and what the scores should be."""
    draw = random.Random(seed)
    rows = []
    for i in range(6):
        prompt, length = draw.randint(1, 3), draw.randint(4, 7)
        tokens = [draw.randint(1, 9) for _ in range(prompt + length)]
        places = sorted(draw.sample(range(prompt, prompt + length), draw.randint(1, 4)))
        targets = [draw.choice([0.0, 1.0, 0.25]) if binary else draw.uniform(-3, 3) for _ in places]
        ids = {"prompt_id": i, "group_id": i, "episode_id": i}
        rows.append(scored_row(tokens, places, prompt_len=prompt, targets=targets, **ids))
    return batch_rows(rows)


def batch_of(options: RewardLossSpec, seed: int) -> TokenBatch:
    if isinstance(options, PairwiseReward):
        return pair_batch(seed)
    return target_batch(seed, binary=options.kind == "process")


def expected(options: RewardLossSpec, batch: TokenBatch, current: Tensor) -> tuple[Tensor, Tensor]:
    """The oracle's loss and its gradient by `current` float64 [N]."""
    leaf = current.clone().requires_grad_()
    places = batch.loss_mask.nonzero()[:, 0].tolist()
    total = torch.zeros((), dtype=torch.float64)
    if isinstance(options, PairwiseReward):
        at = {(int(batch.group_id[row]), int(batch.columns["chosen"][row])): row for row in range(batch.rows)}
        of_row = {int(batch.row_of_token[place]): place for place in places}
        groups = sorted({group for group, _ in at})
        for group in groups:
            chosen, rejected = (leaf[of_row[at[group, side]]] for side in (1, 0))
            margin = options.margin_weight * float(batch.columns["margin"][at[group, 1]])
            total = total + oracle.reward_model_loss(chosen, rejected, margin, options.center)
        total = total / len(groups)
    else:
        one: Any = oracle.rating_loss if options.kind == "regression" else oracle.step_loss
        for place in places:
            total = total + one(leaf[place], float(batch.extras["target"][place]))
        total = total / len(places)
    total.backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [*PAIRS, *TARGETS], ids=lambda o: o.kind)
def test_a_loss_equals_the_oracle_in_value_and_gradient_for_any_split_and_order(
    options: RewardLossSpec, seed: int
) -> None:
    batch = batch_of(options, seed)
    current = torch.randn(batch.tokens.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    loss, slope = expected(options, batch, current)
    objective = objective_of(options)
    for parts in splits(objective, batch):
        got, got_slope = made(objective, batch, current, parts)
        torch.testing.assert_close(got, loss, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got_slope, slope, atol=1e-6, rtol=1e-5)
    order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(seed + 1))
    place = torch.cat([torch.arange(*batch.cu_seqlens[r : r + 2].tolist()) for r in order.tolist()])
    shuffled = batch.select(order)
    got, got_slope = made(objective, shuffled, current[place], [shuffled.loss_mask.nonzero()[:, 0]])
    torch.testing.assert_close(got, loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got_slope, slope[place], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [*PAIRS, *TARGETS], ids=lambda o: o.kind)
def test_metrics_are_those_of_the_step_however_it_is_split(options: RewardLossSpec) -> None:
    batch, objective = batch_of(options, 4), objective_of(options)
    current = torch.randn(batch.tokens.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    seen = [with_metrics(objective, batch, current, parts)[2] for parts in splits(objective, batch)]
    for other in seen[1:]:
        assert other == pytest.approx(seen[0], abs=1e-6)
    scores, targets = current[batch.loss_mask], batch.extras.get("target", current)[batch.loss_mask].double()
    if options.kind == "regression":
        unexplained = float((scores - targets).square().mean() / targets.var(correction=0))
        assert seen[0]["explained_variance"] == pytest.approx(1 - unexplained, abs=1e-5)
    elif options.kind == "process":
        assert seen[0]["accuracy"] == pytest.approx(float(((scores > 0) == (targets > 0.5)).double().mean()), abs=1e-6)


def test_the_published_values_of_a_pair() -> None:
    one = lambda x: torch.tensor([x], dtype=torch.float64)
    assert float(pairwise(one(1.2), one(0.5), one(0.0), 0.0)) == pytest.approx(0.403186, abs=1e-6)
    assert float(pairwise(one(1.2), one(0.5), one(0.3), 0.0)) == pytest.approx(0.513015, abs=1e-6)
    assert float(pairwise(one(1.0), one(0.0), one(0.0), 0.1)) == pytest.approx(math.log1p(math.exp(-1)) + 0.1, abs=1e-9)


def test_scores_far_apart_stay_finite() -> None:
    batch = pair_batch(1)
    current = torch.where(torch.arange(batch.tokens.numel()) % 2 == 0, 50.0, -50.0).double()
    for options in PAIRS:
        loss, slope = made(objective_of(options), batch, current, [batch.loss_mask.nonzero()[:, 0]])
        assert loss.isfinite() and slope.isfinite().all()
    solutions = target_batch(1, binary=True)
    loss, slope = made(
        objective_of(ProcessReward()),
        solutions,
        torch.full((solutions.tokens.numel(),), 50.0, dtype=torch.float64),
        [solutions.loss_mask.nonzero()[:, 0]],
    )
    assert loss.isfinite() and slope.isfinite().all()


def test_what_is_no_pair_and_what_has_no_target_is_an_error() -> None:
    batch = pair_batch(2)
    with pytest.raises(ValueError, match="no pair"):
        objective_of(PairwiseReward()).prepare(batch.select([0, 1, 2]))
    with pytest.raises(ValueError, match="lacks target"):
        objective_of(RegressionReward()).prepare(batch)
    bare = batch_rows([scored_row([1, 2], [1], prompt_len=1, prompt_id=0, group_id=0, episode_id=0)])
    with pytest.raises(ValueError, match="chosen"):
        objective_of(PairwiseReward()).prepare(bare)
