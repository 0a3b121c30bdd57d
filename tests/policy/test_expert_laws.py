"""A model with experts makes the same steps however they are spread over ranks, and goes on from a checkpoint at any other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.model.router import ROUTER_METRICS
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec, RecomputeSpec, RouterSpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.model import tiny
from tests.policy.ranks import context_of, of_any_layout, run_ranks, save_checkpoint

pytestmark = pytest.mark.timeout(400)
OBJECTIVE = PolicyGradient(AlgorithmSpec())
OPTIMIZER = AdamWOptimizer(lr=1e-3, eps=1e-3, clip_grad=0.5, weight_decay=0.1)
"""An epsilon above the gradients' rounding: Adam would blow up the noise of an expert that few tokens chose."""
ROUTER = RouterSpec(balance_loss=0.2, z_loss=0.05, bias_update_rate=0.01)
BIAS = "e_score_correction_bias"
LAYOUTS = {
    "dp2": LayoutSpec(dp=2),
    "dp2_ep2": LayoutSpec(dp=2, ep=2),
    "pp2": LayoutSpec(pp=2),
    "tp2": LayoutSpec(tp=2, sp=True),
    "tp2_etp1": LayoutSpec(tp=2, sp=True, etp=1),
    "tp2_ep2": LayoutSpec(tp=2, sp=True, ep=2, etp=1),
    "cp2": LayoutSpec(cp=2),
    "cp2_ep2": LayoutSpec(cp=2, ep=2),
}
ROWS = ("packed", "padded")
"""Kinds of rows that one rank is run with beside shared prefixes."""
STEPS = 2


def make_batch() -> TokenBatch:
    """The tiny batch with advantages and log-probs of the past."""
    batch = tiny.make_batch()
    draw = torch.Generator().manual_seed(5)
    size = batch.tokens.numel()
    return batch.with_extras(
        proximal=torch.randn(size, generator=draw) * 0.3 - 4.6, advantages=torch.randn(size, generator=draw)
    )


def steps(rank: int, world: int, port: int, folder: Path, scratch: Path, layouts: dict[str, LayoutSpec]) -> Any:
    """For each layout, or kind of rows on one rank: two steps, a checkpoint, and two steps from the first one's checkpoint."""
    return {
        name: _steps(rank, world, port, folder, scratch, name, layout, "one" if world > 1 else name)
        for name, layout in layouts.items()
    }


def _steps(
    rank: int, world: int, port: int, folder: Path, scratch: Path, name: str, layout: LayoutSpec, resumed: str
) -> dict[str, Any]:
    context = context_of(layout, rank, world, port)
    rows = name if name in ROWS else "shared_prefix"
    policy = PolicySpec(
        layout=layout, router=ROUTER, micro_batch_tokens=16, recompute=RecomputeSpec(layers=2), rows=rows
    )

    def started() -> PolicyRank:
        member = PolicyRank(context, folder=str(folder), policy=policy, dtype="float32")
        member.start_training(OPTIMIZER, 10)
        return member

    def run(member: PolicyRank) -> list[dict[str, float]]:
        return [member.train_step(make_batch(), None, OBJECTIVE) for _ in range(STEPS)]

    def weights(member: PolicyRank) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in member.backend.store.weights() if value is not None}

    member = started()
    first = member.train_step(make_batch(), None, OBJECTIVE)
    biases = {key: value for key, value in weights(member).items() if key.endswith(BIAS)}
    metrics = [first, *(member.train_step(make_batch(), None, OBJECTIVE) for _ in range(STEPS - 1))]
    after = weights(member)
    save_checkpoint(member, scratch / name, STEPS)
    again = started()
    again.load(str(scratch / resumed / f"step_{STEPS}"), STEPS)
    return {"metrics": metrics, "biases": biases, "weights": after, "more": run(again), "more_weights": weights(again)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank and two ranks did."""
    scratch = tmp_path_factory.mktemp("experts")
    folder = scratch / "model"
    tiny.make_model("deepseek_v3").save_pretrained(folder)
    alone = dict.fromkeys(("one", *ROWS), LayoutSpec())
    one = run_ranks(steps, 1, tmp_path_factory.mktemp("one"), folder, scratch, alone)
    two = run_ranks(steps, 2, tmp_path_factory.mktemp("two"), folder, scratch, LAYOUTS)
    back = run_ranks(again, 1, tmp_path_factory.mktemp("back"), folder, scratch, list(LAYOUTS))
    return {**one, **two, "back": back, "folder": folder}


def again(rank: int, world: int, port: int, folder: Path, scratch: Path, names: list[str]) -> dict[str, Any]:
    """One rank goes on from the checkpoint of each layout."""
    return {
        name: _steps(rank, world, port, folder, scratch, f"{name}_back", LayoutSpec(), name)["more"] for name in names
    }


@pytest.mark.parametrize("layout", [*LAYOUTS, *ROWS])
def test_steps_are_those_of_one_rank(found: dict[str, Any], layout: str) -> None:
    _same_metrics(found[layout]["metrics"], found["one"]["metrics"])
    _same_weights(found[layout]["weights"], found["one"]["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_one_rank_goes_on_in_every_layout(found: dict[str, Any], layout: str) -> None:
    _same_metrics(found[layout]["more"], found["one"]["more"])
    _same_weights(found[layout]["more_weights"], found["one"]["more_weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_every_layout_goes_on_on_one_rank(found: dict[str, Any], layout: str) -> None:
    _same_metrics(found["back"][layout], found["one"]["more"])


def test_the_losses_of_routers_act(found: dict[str, Any]) -> None:
    first, second = found["one"]["metrics"]
    assert all(name in first for name in ROUTER_METRICS)
    assert second["experts/balance_loss"] < first["experts/balance_loss"]


def test_biases_move_towards_an_even_load_of_the_whole_step(found: dict[str, Any]) -> None:
    model = tiny.hugging_face(found["folder"], torch.float64)
    routed, batch = tiny.watched_routers(model), make_batch()
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(BIAS)}
    counts = torch.zeros(len(before), model.config.n_routed_experts)
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        scored = batch.loss_mask[start:stop].nonzero().flatten()
        if not len(scored):
            continue
        routed.clear()
        model(input_ids=batch.tokens[start : start + int(scored[-1])][None])
        for layer, (_, chosen) in enumerate(routed):
            counts[layer] += torch.bincount(chosen.flatten(), minlength=counts.shape[1])
    assert found["one"]["biases"].keys() == before.keys()
    for load, (name, bias) in zip(counts, before.items(), strict=True):
        moved = bias.float() + ROUTER.bias_update_rate * (load.mean() - load).sign()
        assert (found["one"]["biases"][name] - moved).abs().max() <= 1e-7
        assert found["one"]["biases"][name].dtype is torch.float32


def _same_metrics(got: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    assert len(got) == len(want) == STEPS
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in of_any_layout(theirs).items():
            assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def _same_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-5, name
