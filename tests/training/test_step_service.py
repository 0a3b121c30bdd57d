"""Work on a step's batch: filters, minibatches of whole groups, what a critic's values become."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows, with_ends
from nemo_rl_like.training import step_service
from nemo_rl_like.training.step_service import StepPlan, StepService, filtered, minibatches


def rows_of(rewards: list[list[float]], length: int = 2) -> TokenBatch:
    """A group for each list, an episode of `length` sampled tokens for each number."""
    rows = [
        Row(
            tokens=[1] * (length + 1),
            prompt_len=1,
            loss_mask=[False] + [True] * length,
            behavior=[0.0] * (length + 1),
            version=[0] * (length + 1),
            prompt_id=group,
            group_id=10 + group,
            episode_id=100 * group + i,
            rewards={"reward": reward},
            columns={"truncated": 0.0},
        )
        for group, members in enumerate(rewards)
        for i, reward in enumerate(members)
    ]
    return batch_rows(rows)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The service without Ray: what it would put into the store comes back as it is."""
    monkeypatch.setattr(step_service.ray, "put", lambda value: value)
    return StepService(None)  # type: ignore[arg-type]


def test_dynamic_sampling_keeps_groups_whose_scores_differ(service: Any) -> None:
    batch, count = service.with_spread(rows_of([[1, 1], [0, 1], [0, 0], [1, 0]]))
    assert count == 2 and batch.group_id.unique().tolist() == [11, 13]
    assert service.with_spread(rows_of([[1, 1], [0, 0]])) == (None, 0)


def test_groups_are_chosen_by_their_mean_score(service: Any) -> None:
    batch, count = service.select_groups(rows_of([[1, 1], [0, 1], [0, 0]]), 0.2, 0.8)
    assert count == 1 and batch.group_id.tolist() == [11, 11]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [("best", {0.9, 0.8, 0.5}), ("best_worst", {0.9, 0.8, 0.0}), ("best_random", None)],
)
def test_policy_filtration_keeps_its_share_of_each_group(rule: str, kept: set[float] | None) -> None:
    batch = rows_of([[0.0, 0.5, 0.9, 0.1, 0.8], [0.3, 0.2, 0.1]])
    algorithm = AlgorithmSpec.model_validate({"replay_filter": {"rule": rule, "keep": 3}})
    got = filtered(batch, algorithm, seed=3)
    assert got.group_id.tolist() == [10, 10, 10, 11, 11, 11]
    values = {round(x, 4) for x in got.rewards["reward"][:3].tolist()}
    assert values == kept if kept is not None else {0.9, 0.8} < values
    assert torch.equal(filtered(batch, algorithm, seed=3).episode_id, got.episode_id)


def test_a_step_is_prepared_with_advantages_and_whole_groups(service: Any) -> None:
    plan = StepPlan(AlgorithmSpec(), max_new_tokens=2, updates=2, epochs=2, seed=1)
    made = service.prepare(rows_of([[1, 0], [0, 0], [0, 1]]), plan)
    assert len(made.minibatches) == 4
    for epoch in (made.minibatches[:2], made.minibatches[2:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(6))
        assert all(len({row // 2 for row in rows}) * 2 == len(rows) for rows in epoch)
    assert made.episode_advantages[0] == pytest.approx(0.7071, abs=1e-3)
    assert made.episode_advantages[100] == 0
    assert made.metrics["advantages/mean"] == pytest.approx(0, abs=1e-6)


def test_shuffled_rewards_are_the_same_rewards_elsewhere(service: Any) -> None:
    algorithm = AlgorithmSpec.model_validate({"advantage": {"kind": "reinforce"}, "shuffle_rewards": True})
    batch = rows_of([[1, 2, 3, 4], [5, 6, 7, 8]])
    found = [service.prepare(batch, StepPlan(algorithm, 2, 1, 1, seed)).episode_advantages for seed in (1, 2)]
    assert sorted(found[0].values()) == sorted(found[1].values()) == [float(i) for i in range(1, 9)]
    assert found[0] != found[1]


def test_values_of_rows_with_ends_come_apart_into_values_and_last_values(service: Any) -> None:
    batch = rows_of([[1, 0]], length=3)
    batch = replace(batch, episode_id=torch.tensor([7, 7]))
    asked = with_ends(batch)
    got = service.attach_values(batch, torch.arange(asked.tokens.numel()).float(), True)
    assert got.extras["values"].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert got.column("last_values").tolist() == [9.0, 9.0]  # both rows are one episode: the value after its last row
    plain = service.attach_values(batch, torch.zeros(8), False)
    assert "last_values" not in plain.columns


def test_one_update_takes_all_rows_in_order() -> None:
    assert minibatches(torch.tensor([3, 3, 4]), updates=1, epochs=2, seed=0) == (None, None)
