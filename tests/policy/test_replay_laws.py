"""Router replay: a model whose routers would choose otherwise takes the step of the one that chose, in any layout and kind of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.generation.embedded import EmbeddedEngine
from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.model.router import ENGINE_DIFFERS
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.policy.walk import Walk
from nemo_rl_like.rollout.live import LiveSegment
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.optimizer import SgdOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec, RecomputeSpec, RouterSpec
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows
from nemo_rl_like.tokens.routes import ROUTES
from tests.model import tiny
from tests.policy.ranks import context_of, run_ranks
from tests.policy.test_expert_laws import BIAS, OBJECTIVE, make_batch

pytestmark = pytest.mark.timeout(400)
OPTIMIZER = SgdOptimizer(lr=0.05, clip_grad=1.0)
ON_POLICY = PolicyGradient(AlgorithmSpec(), on_policy=True)
"""The step's only update, whose pass is the first one."""
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


def two_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of two models that differ in the biases of routers alone."""
    scratch = tmp_path_factory.mktemp("replay")
    folders = [scratch / "model", scratch / "other"]
    for folder in folders:
        tiny.make_model("deepseek_v3").save_pretrained(folder)
    file = folders[1] / "model.safetensors"
    tensors, draw = load_file(file), torch.Generator().manual_seed(3)
    biases = {n: torch.randn(t.shape, generator=draw) for n, t in tensors.items() if n.endswith(BIAS)}
    save_file({**tensors, **biases}, file, metadata={"format": "pt"})
    return folders


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two models that differ in the biases of routers alone, on one rank and on two."""
    folders = two_models(tmp_path_factory)
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


def engine_cases(rank: int, world: int, port: int, folders: list[Path], named: dict[str, Any]) -> Any:
    """For each layout: a batch that the first model's engine sampled, and steps of that model that replay one record or another."""
    return {name: _engine_case(rank, world, port, folders, *case) for name, case in named.items()}


def _engine_case(
    rank: int, world: int, port: int, folders: list[Path], layout: LayoutSpec, rows: Any
) -> dict[str, Any]:
    context = context_of(layout, rank, world, port)

    def started(folder: Path, replay: Any) -> PolicyRank:
        policy = PolicySpec(
            layout=layout, rows=rows, router=RouterSpec(replay=replay), micro_batch_tokens=16, recompute=RecomputeSpec()
        )
        member = PolicyRank(context, folder=str(folder), policy=policy, dtype="float32")
        member.start_training(OPTIMIZER, 10)
        return member

    def recorded(member: PolicyRank, batch: TokenBatch) -> Tensor:
        watch = member.backend.watch
        assert watch is not None
        with watch.routes.recording(batch.tokens.numel(), torch.device("cpu")) as routes:
            member._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False, record=True)
        return routes

    def stepped(replay: Any, batch: TokenBatch, routes: Tensor) -> dict[str, Any]:
        member = started(folders[0], replay)
        metrics = member.train_step(batch.with_extras(**{ROUTES: routes}), None, ON_POLICY)
        assert member.backend.watch is not None
        weights = {n: v.clone() for n, v in member.backend.store.weights() if v is not None and not n.endswith(BIAS)}
        return {"loss": metrics["loss"], "weights": weights, "metrics": metrics}

    first = started(folders[0], "none")
    batch = sampled(EmbeddedEngine(context, model_handle=first.model, engine=EngineSpec(), record_routes=True))  # type: ignore[arg-type]
    of_engine, own, other = batch.extras[ROUTES], recorded(first, batch), recorded(started(folders[1], "none"), batch)
    return {
        "batch": batch,
        "own": own,
        "other": other,
        "first_pass": stepped("first_pass", batch, own),
        "engine": stepped("engine", batch, of_engine),
        "planted": stepped("engine", batch, other),
    }


def sampled(engine: EmbeddedEngine) -> TokenBatch:
    """Three prompts and two samples of each, with advantages."""
    prompts = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7))
    requests = [Request(f"r{i}", prompt, (2 * i, 2 * i + 1)) for i, prompt in enumerate(prompts)]
    rows = []
    for group, completions in enumerate(engine.generate(requests, Sampling(max_new_tokens=5))):
        for completion in completions:
            segment = LiveSegment.of_prompt(prompts[group])
            segment.add_sampled(completion.ids, completion.logprobs, 0, 0)
            assert completion.prompt_routes is not None and completion.routes is not None
            segment.add_routes(completion.prompt_routes, completion.routes)
            row = segment.freeze()
            rows.append(
                Row(
                    row.tokens,
                    row.prompt_len,
                    row.sampled,
                    row.behavior,
                    row.version,
                    group,
                    group,
                    len(rows),
                    routes=row.routes,
                )
            )
    batch = batch_rows(rows)
    draw = torch.Generator().manual_seed(5)
    return batch.with_extras(advantages=torch.randn(batch.tokens.numel(), generator=draw))


ENGINE_ONE = {"packed": (LayoutSpec(), "packed")}
ENGINE_TWO = {
    "dp2": (LayoutSpec(dp=2), "shared_prefix"),
    "pp2": (LayoutSpec(pp=2), "packed"),
    "tp2_ep2": (LayoutSpec(tp=2, sp=True, ep=2, etp=1), "padded"),
    "cp2_ep2": (LayoutSpec(cp=2, ep=2), "shared_prefix"),
}


@pytest.fixture(scope="module")
def of_engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On one rank."""
    return run_ranks(engine_cases, 1, tmp_path_factory.mktemp("engine"), two_models(tmp_path_factory), ENGINE_ONE)


@pytest.fixture(scope="module")
def of_engine_on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On two ranks."""
    return run_ranks(engine_cases, 2, tmp_path_factory.mktemp("engine2"), two_models(tmp_path_factory), ENGINE_TWO)


def assert_replays_the_engine(case: dict[str, Any], weights: dict[str, Tensor], planted: dict[str, Tensor]) -> None:
    """Steps are `weights`, that of the first pass, and `planted`, where the record is another model's."""
    batch, own, other = case["batch"], case["own"], case["other"]
    passed = own[:, 0] > 0
    told = batch.extras[ROUTES]
    assert torch.equal(told[passed].sort(1).values, own[passed].sort(1).values)
    assert abs(case["engine"]["loss"] - case["first_pass"]["loss"]) <= 1e-6
    assert case["engine"]["metrics"][ENGINE_DIFFERS] == 0
    by_layer = [x[passed].unflatten(1, (2, -1)).sort(2).values for x in (own, other)]
    share = (by_layer[0] != by_layer[1]).flatten(1).any(1).float().mean()
    assert share > 0.3 and abs(case["planted"]["metrics"][ENGINE_DIFFERS] - share) <= 1e-6
    for name, value in weights.items():
        assert (case["engine"]["weights"][name] - value).abs().max() <= 1e-5, name
        assert (case["planted"]["weights"][name] - planted[name]).abs().max() <= 1e-5, name
    assert max((planted[name] - value).abs().max() for name, value in weights.items()) > 1e-3


def test_what_an_engine_recorded_is_replayed_and_another_models_record_changes_the_experts(of_engine: Any) -> None:
    case = of_engine["packed"]
    assert_replays_the_engine(case, case["first_pass"]["weights"], case["planted"]["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINE_TWO)
def test_an_engines_record_is_replayed_alike_in_every_layout(of_engine: Any, of_engine_on_two: Any, name: str) -> None:
    one, two = of_engine["packed"], of_engine_on_two[name]
    assert torch.equal(two["batch"].tokens, one["batch"].tokens)
    assert_replays_the_engine(two, one["first_pass"]["weights"], one["planted"]["weights"])
