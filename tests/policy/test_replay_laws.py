"""Router replay: a model whose routers would choose otherwise takes the step of the one that chose, in any layout and kind of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_like.model.routes import ROUTES
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.policy.walk import Walk
from nemo_rl_like.spec.optimizer import SgdOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec, RecomputeSpec, RouterSpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.model import tiny
from tests.policy.ranks import context_of, run_ranks
from tests.policy.test_expert_laws import BIAS, OBJECTIVE, make_batch

pytestmark = pytest.mark.timeout(400)
OPTIMIZER = SgdOptimizer(lr=0.05, clip_grad=1.0)
ONE = {kind: (LayoutSpec(), kind) for kind in ("shared_prefix", "packed", "padded")}
TWO = {
    "dp2_ep2": (LayoutSpec(dp=2, ep=2), "shared_prefix"),
    "pp2": (LayoutSpec(pp=2), "packed"),
    "tp2": (LayoutSpec(tp=2, sp=True, ep=2, etp=1), "padded"),
    "cp2": (LayoutSpec(cp=2), "shared_prefix"),
}


def cases(rank: int, world: int, port: int, folders: list[Path], named: dict[str, Any], told: Tensor | None) -> Any:
    """For each layout: the routes that the first model records, its step, and the steps of the second with and without `told` routes."""
    return {name: _case(rank, world, port, folders, *case, told) for name, case in named.items()}


def _case(
    rank: int, world: int, port: int, folders: list[Path], layout: LayoutSpec, rows: Any, told: Tensor | None
) -> dict[str, Any]:
    context, batch = context_of(layout, rank, world, port), make_batch()

    def started(folder: Path, replay: Any) -> PolicyRank:
        policy = PolicySpec(
            layout=layout, rows=rows, router=RouterSpec(replay=replay), micro_batch_tokens=16, recompute=RecomputeSpec()
        )
        member = PolicyRank(context, folder=str(folder), policy=policy, dtype="float32")
        member.start_training(OPTIMIZER, 10)
        return member

    def stepped(member: PolicyRank, batch: TokenBatch) -> dict[str, Tensor]:
        member.train_step(batch, None, OBJECTIVE)
        return {n: v.clone() for n, v in member.backend.store.weights() if v is not None and not n.endswith(BIAS)}

    first = started(folders[0], "none")
    watch = first.backend.watch
    assert watch is not None
    with watch.routes.recording(batch.tokens.numel(), torch.device("cpu")) as routes:
        first._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False, record=True)
    told = routes if told is None else told
    return {
        "routes": routes,
        "first": stepped(first, batch),
        "replayed": stepped(started(folders[1], "first_pass"), batch.with_extras(**{ROUTES: told})),
        "free": stepped(started(folders[1], "none"), batch.with_extras(**{ROUTES: told})),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two models that differ in the biases of routers alone, on one rank and on two."""
    scratch = tmp_path_factory.mktemp("replay")
    folders = [scratch / "model", scratch / "other"]
    for folder in folders:
        tiny.make_model("deepseek_v3").save_pretrained(folder)
    file = folders[1] / "model.safetensors"
    tensors, draw = load_file(file), torch.Generator().manual_seed(3)
    biases = {n: torch.randn(t.shape, generator=draw) for n, t in tensors.items() if n.endswith(BIAS)}
    save_file({**tensors, **biases}, file, metadata={"format": "pt"})
    one = run_ranks(cases, 1, tmp_path_factory.mktemp("one"), folders, ONE, None)
    two = run_ranks(cases, 2, tmp_path_factory.mktemp("two"), folders, TWO, one["packed"]["routes"])
    return {**one, **two}


@pytest.mark.parametrize("case", [*ONE, *TWO])
def test_a_replayed_step_is_that_of_the_model_that_chose(found: dict[str, Any], case: str) -> None:
    for name, value in found["packed"]["first"].items():
        assert (found[case]["replayed"][name] - value).abs().max() <= 1e-5, name
    freely = [(found[case]["free"][name] - value).abs().max() for name, value in found["packed"]["first"].items()]
    assert max(freely) > 1e-3


@pytest.mark.parametrize("case", [*ONE, *TWO])
def test_what_is_recorded_is_the_same_in_every_layout(found: dict[str, Any], case: str) -> None:
    routes, batch = found[case]["routes"], make_batch()
    assert torch.equal(routes, found["packed"]["routes"])
    passed = torch.zeros(batch.tokens.numel(), dtype=torch.bool)
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        scored = batch.loss_mask[start:stop].nonzero().flatten()
        passed[start : start + (int(scored[-1]) if len(scored) else 0)] = True
    assert torch.equal((routes > 0).all(1), passed)
    assert torch.equal((routes > 0).any(1), passed)
