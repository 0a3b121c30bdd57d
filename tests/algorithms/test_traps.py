"""Traps that other systems fell into, each by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from nemo_rl_like.algorithms import aggregation, policy_losses
from nemo_rl_like.algorithms.episodes import Episodes
from nemo_rl_like.algorithms.objectives import Outputs
from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.algorithms.sequences import Scored
from nemo_rl_like.algorithms.shaping import kept_groups, shaped
from nemo_rl_like.algorithms.step import with_advantages
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.policy_losses import CispoLoss
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows


def row(mask: list[int], reward: float = 1.0, group: int = 0, episode: int = 0, **more: Any) -> Row:
    """A row of one prompt token, then trained (1) and environment (0) tokens."""
    n = len(mask) + 1
    columns = {"truncated": float(more.pop("truncated", False))}
    extras = {name: [0.0, *values] for name, values in more.items()}
    return Row(
        tokens=[5] * n,
        prompt_len=1,
        loss_mask=[False, *map(bool, mask)],
        behavior=[0.0] * n,
        version=[0] * n,
        prompt_id=group,
        group_id=group,
        episode_id=episode,
        rewards={"reward": reward},
        columns=columns,
        extras=extras,
    )


def algorithm(**block: Any) -> AlgorithmSpec:
    """An algorithm block."""
    return AlgorithmSpec.model_validate(block)


def of_trained(batch: TokenBatch, name: str) -> list[float]:
    """An extra at the trained tokens."""
    values: list[float] = batch.extras[name][batch.loss_mask].tolist()
    return values


def test_token_mean_over_25_live_of_30_tokens_counts_25() -> None:
    mask = torch.tensor([True] * 25 + [False] * 5)
    weights = aggregation.token_weights("token_mean", mask, torch.zeros(30, dtype=torch.int64), 1)
    assert weights[:25].unique().tolist() == [pytest.approx(1 / 25)]
    assert not weights[25:].any()


def test_the_dr_grpo_divisor_does_not_move_with_padding() -> None:
    def weights(mask: list[bool]) -> Tensor:
        places = torch.zeros(len(mask), dtype=torch.int64)
        return aggregation.token_weights("sequence_mean_token_sum_norm", torch.tensor(mask), places, 1, 16)

    assert weights([True] * 4).unique().tolist() == weights([True] * 4 + [False] * 9)[:4].unique().tolist() == [1 / 16]


@pytest.mark.parametrize(("gamma", "first"), [(1.0, 1.0), (0.9, 0.9)])
def test_returns_cross_tool_tokens_without_decay(gamma: float, first: float) -> None:
    batch = batch_rows([row([1, 0, 0, 0, 1])])
    found = Episodes.of(batch)
    got = found.scan_back(found.rewards_by_token(), gamma)
    assert got.tolist() == pytest.approx([first, 1.0])


def test_kl_sums_and_response_lengths_ignore_environment_tokens() -> None:
    far = [0.0, 50.0, 50.0, 0.0]
    batch = batch_rows([row([1, 0, 0, 1], proximal=far, reference=[0.0] * 4)])
    kl = {"coef": 1.0, "estimator": "k1", "place": "reward"}
    assert of_trained(with_advantages(batch, algorithm(advantage={"kind": "reinforce"}, kl=kl), 9), "advantages") == [
        1.0,
        1.0,
    ]
    priced = shaped(Episodes.of(batch), algorithm(shaping=[{"kind": "length_penalty", "coef": 0.1}]).shaping, 9)
    assert priced.rewards.tolist() == pytest.approx([0.8])


def test_the_cispo_cap_is_not_the_clip_epsilon() -> None:
    one = torch.ones(1)
    tokens = Scored(one * 1.0, torch.zeros(1), one, torch.zeros(1, dtype=torch.int64), one, {})
    told = policy_losses.cispo(tokens, CispoLoss())
    assert float(told.loss) == pytest.approx(-math.e)
    assert not told.clipped_high.any()


def test_a_missing_reference_is_an_error_not_log_prob_0() -> None:
    batch = with_advantages(batch_rows([row([1]), row([1], 0.0, episode=1)]), algorithm(), 9)
    with pytest.raises(ValueError, match="reference"):
        PolicyGradient(algorithm(kl={"coef": 0.1}), on_policy=True).prepare(batch)
    with pytest.raises(ValueError, match="proximal"):
        with_advantages(batch, algorithm(kl={"coef": 0.1, "estimator": "k1", "place": "reward"}), 9)


def test_the_overlong_penalty_stops_at_minus_1() -> None:
    lengths = (800, 900, 1000, 1100, 5000)
    batch = batch_rows([row([1] * n, reward=0.0, episode=i) for i, n in enumerate(lengths)])
    block = algorithm(shaping=[{"kind": "overlong", "cache": 200}])
    assert shaped(Episodes.of(batch), block.shaping, 1000).rewards.tolist() == [0.0, -0.5, -1.0, -1.0, -1.0]


def test_dynamic_filtering_looks_at_raw_scores() -> None:
    batch = batch_rows([row([1], 1.0, episode=0), row([1] * 5, 1.0, episode=1)])
    block = algorithm(shaping=[{"kind": "length_penalty", "coef": 0.1}])
    found = Episodes.of(batch)
    assert kept_groups(found).tolist() == [False]
    assert kept_groups(shaped(found, block.shaping, 9)).tolist() == [True]


def test_segments_of_one_episode_count_once_in_their_group() -> None:
    rows = [row([1], reward, episode=episode) for episode, reward in ((0, 1.0), (0, 1.0), (0, 1.0), (1, 0.0))]
    found = with_advantages(batch_rows(rows), algorithm(advantage={"kind": "dr_grpo"}), 9)
    assert of_trained(found, "advantages") == [0.5, 0.5, 0.5, -0.5]


def test_rows_of_zero_advantage_are_not_live_but_count_in_the_denominators() -> None:
    batch = batch_rows([row([1, 1], episode=i) for i in range(4)])
    batch = batch.with_extras(advantages=torch.where(batch.row_of_token < 2, 0.0, 1.0))
    stats = PolicyGradient(on_policy=True).prepare(batch)
    assert stats.live_rows.tolist() == [False, False, True, True]
    assert (stats.weights[batch.loss_mask] > 0).all()
    assert PolicyGradient(algorithm(entropy_coef=0.1), on_policy=True).prepare(batch).live_rows.all()
    still = batch.with_extras(advantages=torch.zeros(batch.tokens.numel()))
    assert PolicyGradient(on_policy=True).prepare(still).live_rows.all()


def test_on_policy_ratio_is_exactly_one_and_nothing_is_clipped() -> None:
    batch = batch_rows([row([1, 1]), row([1, 1, 1], 0.0, episode=1)])
    objective = PolicyGradient(on_policy=True)
    stats = objective.prepare(with_advantages(batch, algorithm(), 9))
    index = batch.loss_mask.nonzero()[:, 0]
    values = {name: value[index] for name, value in stats.values.items()}
    out = objective.loss(Outputs(torch.randn(5), torch.zeros(5)), values, stats.weights[index], stats)
    assert float(out.metrics["ratio/mean"]) == 1.0
    assert out.metrics["clip_ratio/low_mean"] == out.metrics["clip_ratio/high_mean"] == out.metrics["approx_kl"] == 0


def test_a_truncated_sample_is_out_of_numerator_and_denominator() -> None:
    batch = batch_rows([row([1, 1], truncated=True), row([1, 1, 1], 0.0, episode=1)])
    batch = with_advantages(batch, algorithm(mask_truncated=True), 9)
    stats = PolicyGradient(algorithm(mask_truncated=True), on_policy=True).prepare(batch)
    assert stats.weights[batch.loss_mask].tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3])
    assert stats.live_rows.tolist() == [False, True]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"policy_loss": {"kind": "gspo"}}, "gspo has one value a sequence.*token_mean"),
        ({"aggregation": {"kind": "sequence_mean"}}, "clip has one value a token"),
        ({"correction": [{"kind": "tis"}, {"kind": "icepop"}]}, "tis and icepop; keep one"),
        ({"kl": {"coef": 0.1, "estimator": "k1"}}, "expected gradient of 0"),
        ({"kl": {"coef": 0.1, "estimator": "k3", "place": "reward"}}, "needs `estimator: k1`"),
        ({"policy_loss": {"kind": "clip", "dual": 0.5}}, "greater than 1"),
        (
            {"policy_loss": {"kind": "gspo"}, "aggregation": {"kind": "sequence_mean"}, "top_entropy": 0.2},
            "`top_entropy` chooses tokens",
        ),
        ({"shaping": [{"kind": "clip", "low": 1.0, "high": 0.0}]}, "must be below"),
    ],
)
def test_an_impossible_combination_is_refused_with_the_reason(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        algorithm(**block)
