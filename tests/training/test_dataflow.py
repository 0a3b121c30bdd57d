"""The standard dataflow over stand-ins for the services, which are called as `StepServices` declares them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.training.dataflow import adapt_entropy, adapt_kl, collect, on_pairs, standard
from nemo_rl_like.training.reinforcement import dataflow_of
from nemo_rl_like.training.step_services import StepServices


def services(spec: RlStageSpec, spreads: list[int]) -> Any:
    """Stand-in services whose n-th rollout has `spreads[n]` groups with spread."""
    run = create_autospec(StepServices, instance=True)
    run.spec, run.kl_coef = spec, spec.algorithm.kl.coef
    run.entropy_coef = run.entropy_level = spec.algorithm.entropy_coef
    left = list(spreads)
    summary = SimpleNamespace(metrics=lambda: {"reward": 0.5}, samples=())
    run.rollout.side_effect = lambda step, prompts, first_group=0: (f"batch from {first_group}", summary)

    def with_spread(batch: str) -> tuple[str | None, int]:
        count = left.pop(0)
        return (f"{count} of {batch}" if count else None), count

    run.groups_with_spread.side_effect = with_spread
    run.join.side_effect = lambda *batches: list(batches)
    run.log_probs.side_effect = lambda batch: (batch, {"gap/p99": 0.0})
    run.values.side_effect = lambda batch: batch
    run.advantages.return_value = SimpleNamespace(metrics={"advantages/std": 1.0}, episode_advantages={})
    run.update.return_value = {"loss": 0.1, "kl/k1": 0.4}
    return run


def stage(**algorithm: Any) -> RlStageSpec:
    """A stage of 4 prompts a step."""
    return RlStageSpec.model_validate({"prompts_per_step": 4, "algorithm": algorithm})


def test_a_step_runs_its_services_in_order_and_reports_their_metrics() -> None:
    run = services(stage(), [])
    report = standard(run, 3)
    order = [call[0] for call in run.method_calls]
    assert order == ["rollout", "log_probs", "values", "advantages", "update"]
    assert report.metrics == {"reward": 0.5, "gap/p99": 0.0, "advantages/std": 1.0, "loss": 0.1, "kl/k1": 0.4}


@pytest.mark.parametrize("found", ["pairs", None])
def test_a_step_on_pairs_updates_only_where_two_samples_differ(found: str | None) -> None:
    run = services(stage(pairs={}), [])
    run.pairs.return_value = (found, {"pairs": 2.0 if found else 0.0})
    run.update_on_pairs.return_value = {"loss": 0.7}
    report = on_pairs(run, 3)
    order = [call[0] for call in run.method_calls]
    assert order == ["rollout", "pairs", *(["update_on_pairs"] if found else [])]
    assert report.metrics == {"reward": 0.5, "pairs": 2.0, "loss": 0.7} if found else {"reward": 0.5, "pairs": 0.0}


def test_dynamic_sampling_draws_what_is_missing_and_numbers_groups_on() -> None:
    run = services(stage(dynamic_sampling={}), [1, 2, 1])
    made = collect(run, 1)
    asked = [(call.args, call.kwargs) for call in run.rollout.call_args_list]
    assert asked == [((1, 4), {}), ((1, 3), {"first_group": 4}), ((1, 1), {"first_group": 7})]
    assert made.batch == ["1 of batch from 0", "2 of batch from 4", "1 of batch from 7"]
    assert made.metrics == {
        "reward": 0.5,
        "dynamic_sampling/kept_groups": 4.0,
        "dynamic_sampling/drawn_groups": 8.0,
    }


def test_dynamic_sampling_ends_at_its_bound_and_goes_on_with_the_first_rollout_if_nothing_has_spread() -> None:
    run = services(stage(dynamic_sampling={"max_refills": 2}), [0, 0, 0])
    assert collect(run, 1).batch == "batch from 0"
    assert run.rollout.call_count == 3


def test_an_adaptive_kl_moves_towards_its_target_for_the_next_step() -> None:
    run = services(stage(kl={"coef": 0.1, "adaptive": {"target": 0.1, "horizon": 320}}), [])
    assert adapt_kl(run, {"kl/k1": 0.4}) == {"kl/coef": 0.1}
    assert run.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 32 / 320))
    assert adapt_kl(run, {}) == {"kl/coef": pytest.approx(0.102)}  # a step that did not train the policy measures none


def test_an_adaptive_entropy_bonus_rises_below_its_target_and_rests_above_it() -> None:
    run = services(stage(adaptive_entropy={"target": 0.2, "step": 0.01}, entropy_coef=0.005), [])
    seen = []
    for measured in (0.1, 0.1, 0.3, 0.2, 0.5, 0.5, 0.5, 0.1):
        assert adapt_entropy(run, {"entropy": measured}) == {"entropy/coef": seen[-1] if seen else 0.005}
        seen.append(run.entropy_coef)
    assert seen == pytest.approx([0.015, 0.025, 0.0, 0.015, 0.0, 0.0, 0.0, 0.01])
    assert adapt_entropy(run, {}) == {"entropy/coef": pytest.approx(0.01)}
    assert adapt_entropy(services(stage(), []), {"entropy": 0.1}) == {}


def test_a_loop_is_found_by_file_and_function(tmp_path: Any) -> None:
    assert dataflow_of(RlStageSpec()) is standard
    assert dataflow_of(stage(pairs={})) is on_pairs
    found = dataflow_of(RlStageSpec(loop="docs/custom_loop.py:step"))
    assert list(inspect.signature(found).parameters) == ["run", "number"]
    with pytest.raises(SpecError, match="has no function 'stp'; it has .*step"):
        dataflow_of(RlStageSpec(loop="docs/custom_loop.py:stp"))
    with pytest.raises(InputError, match="loop: .*no such file"):
        dataflow_of(RlStageSpec(loop=f"{tmp_path}/none.py:step"))
