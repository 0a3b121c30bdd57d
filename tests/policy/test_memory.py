"""The estimate of `model.memory` against the bytes of tensors that real training steps hold, on one rank and on two."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_like.spec.policy import LayoutSpec
from tests.policy.ranks import context_of, run_ranks

TOLERANCE = 0.03
RANKS_TOLERANCE = 0.05
"""Of several ranks: a collective may hold a tensor for a moment longer."""
PARTS = ("parameters", "gradients", "optimizer", "total")
EXPERTS = 8
"""Of a layer of the benchmark's models."""
TIMEOUT_S = 550.0
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
LAYOUTS = {
    "dp2": LayoutSpec(dp=2),
    "tp2": LayoutSpec(tp=2),
    "tp2 sp": LayoutSpec(tp=2, sp=True),
    "pp2": LayoutSpec(pp=2),
    "pp2 vpp2": LayoutSpec(pp=2, vpp=2),
    "cp2": LayoutSpec(cp=2),
}
EXPERT_LAYOUTS = {
    "ep2": LayoutSpec(dp=2, ep=2),
    "cp2 ep2": LayoutSpec(cp=2, ep=2),
    "tp2 sp": LayoutSpec(tp=2, sp=True),
    "tp2 sp ep2 etp1": LayoutSpec(tp=2, sp=True, ep=2, etp=1),
}
RECOMPUTED = {
    "llama, tp2 sp, recomputed": ("llama, recompute", LayoutSpec(tp=2, sp=True)),
    "llama, pp2, recomputed": ("llama, recompute", LayoutSpec(pp=2)),
    "llama, cp2, core_attn recomputed": ("llama, recompute core_attn", LayoutSpec(cp=2)),
}
EXPERTS_AT = LayoutSpec(tp=2, sp=True, ep=2, etp=1)
FAMILIES = {
    "gemma2, tp2 sp": ("gemma2", LayoutSpec(tp=2, sp=True)),
    "gemma2, pp2": ("gemma2", LayoutSpec(pp=2)),
    "gemma3_text, cp2": ("gemma3_text", LayoutSpec(cp=2)),
    "nemotron, tp2 sp": ("nemotron", LayoutSpec(tp=2, sp=True)),
    "qwen2_moe, ep2": ("qwen2_moe", LayoutSpec(dp=2, ep=2)),
    "glm4_moe, tp2 sp": ("glm4_moe", LayoutSpec(tp=2, sp=True)),
    "glm4_moe, pp2": ("glm4_moe", LayoutSpec(pp=2)),
    "gpt_oss, tp2 sp ep2 etp1": ("gpt_oss", EXPERTS_AT),
    "deepseek_v3, tp2 sp ep2 etp1": ("deepseek_v3", EXPERTS_AT),
    "deepseek_v3, cp2 ep2, recomputed": ("deepseek_v3, recompute", LayoutSpec(cp=2, ep=2)),
    "qwen3_moe, ep2, recomputed": ("qwen3_moe, recompute", LayoutSpec(dp=2, ep=2)),
    "qwen3_moe, ep2, experts recomputed": ("qwen3_moe, recompute moe, bfloat16", LayoutSpec(dp=2, ep=2)),
}
"""With routers that give all experts as many tokens: what the estimate supposes."""
LONGER = {"prompt": 56, "response": 200, "micro_batch_tokens": 512}
"""Longer rows: activations must outweigh the copies of its buffers that gloo makes to sum them."""


def compared(
    rank: int,
    world: int,
    port: int,
    cases: dict[str, tuple[str, dict[str, Any]]],
    kept: int | None = None,
    evenly: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Estimated and measured bytes of every rank, by case: a name of the benchmark's and what is changed in it.

    `kept`: bytes of exponentials that the head may keep, instead of 512 MiB. `evenly`: routers give all experts as many tokens.
    """
    from nemo_rl_like.model import activations, heads

    sys.path.insert(0, BENCHMARKS)
    import memory

    if kept is not None:
        activations.KEPT_EXPONENTIALS = heads.KEPT_EXPONENTIALS = kept
    if evenly:
        send_evenly()
    found: dict[str, list[dict[str, Any]]] = {}
    for name, (base, changes) in cases.items():
        case = replace({**memory.CASES, **memory.MORE_CASES}[base], **changes)
        estimate, measured = memory.compare(case, context_of(case.layout, rank, world, port))
        every: list[Any] = [None] * world
        dist.all_gather_object(every, memory.as_json(estimate, measured))
        found[name] = every
    return found


def send_evenly() -> None:
    """Routers choose neighbouring experts, in turn, however they would like to."""
    from nemo_rl_like.model.routes import Routes

    def in_turn(self: Routes, layer: int, rows: object, index: torch.Tensor) -> torch.Tensor:
        return torch.arange(index.numel()).view_as(index) % EXPERTS

    Routes.busy = property(lambda self: True)  # type: ignore[method-assign,assignment]
    Routes.choose = in_turn  # type: ignore[method-assign,assignment]


def case_names(collection: str) -> list[str]:
    """Those of a collection of the benchmark's."""
    sys.path.insert(0, BENCHMARKS)
    try:
        return list(getattr(importlib.import_module("memory"), collection))
    finally:
        sys.path.remove(BENCHMARKS)


def assert_within(entries: dict[str, dict[str, Any]]) -> None:
    """Every part."""
    for name, entry in entries.items():
        for part, ratio in entry["estimated_over_measured"].items():
            assert abs(ratio - 1) <= TOLERANCE, (name, part, entry)


def test_every_part_is_what_a_step_on_one_rank_holds(tmp_path: Path) -> None:
    found = run_ranks(compared, 1, tmp_path, {name: (name, {}) for name in case_names("CASES")}, timeout_s=TIMEOUT_S)
    assert_within({name: ranks[0] for name, ranks in found.items()})


@pytest.mark.slow
def test_every_family_is_counted_in_any_type_and_kind_of_rows_and_computed_again(tmp_path: Path) -> None:
    cases = {name: (name, {}) for name in case_names("MORE_CASES")}
    found = run_ranks(compared, 1, tmp_path, cases, timeout_s=TIMEOUT_S)
    assert_within({name: ranks[0] for name, ranks in found.items()})


def test_a_head_that_keeps_few_chunks_holds_one_more_while_it_makes_the_next(tmp_path: Path) -> None:
    name = "llama, 4096 tokens of vocabulary, chunks of 128"
    found = run_ranks(compared, 1, tmp_path, {name: (name, {})}, 2 * 128 * 4096 * 4)
    assert_within({name: found[name][0]})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Both ranks of every layout, in one start."""
    cases = {f"llama, {name}": ("llama, micro-batches of two rows", at) for name, at in LAYOUTS.items()}
    cases |= {f"experts, {name}": ("qwen3_moe, micro-batches of two rows", at) for name, at in EXPERT_LAYOUTS.items()}
    cases |= RECOMPUTED
    longer = {name: (base, LONGER | {"layout": layout}) for name, (base, layout) in cases.items()}
    return run_ranks(compared, 2, tmp_path_factory.mktemp("ranks"), longer, timeout_s=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"llama, {name}" for name in LAYOUTS] + [*RECOMPUTED])
def test_every_rank_of_a_layout_holds_what_is_estimated(case: str, two_ranks: Any) -> None:
    for entry in two_ranks[case]:
        for part in PARTS:
            assert abs(entry["estimated_over_measured"][part] - 1) <= RANKS_TOLERANCE, (part, entry)


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"experts, {name}" for name in EXPERT_LAYOUTS])
def test_ranks_with_experts_hold_what_is_estimated_on_average(case: str, two_ranks: Any) -> None:
    """A rank whose experts are chosen more often than others holds more, which no estimate can know."""
    ranks = two_ranks[case]
    for part in PARTS:
        estimated, measured = (sum(entry[kind][part] for entry in ranks) for kind in ("estimated", "measured"))
        assert abs(estimated / measured - 1) <= RANKS_TOLERANCE, (part, ranks)


@pytest.fixture(scope="module")
def two_even_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Both ranks of every family, in one start."""
    longer = {name: (base, LONGER | {"layout": layout}) for name, (base, layout) in FAMILIES.items()}
    folder = tmp_path_factory.mktemp("even")
    return run_ranks(compared, 2, folder, longer, None, True, timeout_s=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_every_rank_of_a_family_holds_what_is_estimated_where_experts_get_as_many_tokens(
    case: str, two_even_ranks: Any
) -> None:
    """Also where experts on several ranks are computed again, at whose peak one layer's share of tokens is all that counts."""
    for entry in two_even_ranks[case]:
        for part in PARTS:
            assert abs(entry["estimated_over_measured"][part] - 1) <= RANKS_TOLERANCE, (part, entry)
        for part in ("parameters", "gradients"):
            assert entry["estimated"][part] == entry["measured"][part], (part, entry)
