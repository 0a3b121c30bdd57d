"""Laws over tensor, pipeline and data parallelism, on four gloo ranks started once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model import tiny
from tests.model.parallel_rank import (
    ALL_KINDS,
    BALANCED,
    EVERY,
    FEW,
    KINDS,
    ROUTER,
    TEMPERATURE,
    WORLD,
    Results,
    fits,
    for_experts,
    in_fast_suite,
    name_of,
    runs,
)

pytestmark = pytest.mark.timeout(1000)
CASES = [
    pytest.param(family, name_of(layout), marks=() if in_fast_suite(family, layout) else pytest.mark.slow)
    for family in tiny.FAMILIES
    for layout in EVERY
    if fits(family, layout)
]


def layouts_of(family: str) -> list[object]:
    """Names of the layouts that a family runs in, slow ones marked."""
    return [pytest.param(case.values[1], marks=case.marks) for case in CASES if case.values[0] == family]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_equal_hugging_face_in_every_layout(
    four_ranks: Results, folders: dict[str, Path], family: str, layout: str
) -> None:
    model = tiny.hugging_face(folders[family])
    rows = [list(range(40)), [3, 1, 4], [7]]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])
    assert (four_ranks.tensors[f"{family}/{layout}/logits"] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logprobs_and_gradients_are_the_same_in_every_layout(
    four_ranks: Results, folders: dict[str, Path], family: str, layout: str
) -> None:
    expected = tiny.reference(folders[family], tiny.make_batch(), TEMPERATURE)
    for kind, budget in runs(family):
        case = f"{family}/{layout}/{kind}{budget}"
        assert (four_ranks.tensors[f"{case}/logprobs"] - expected.logprobs).abs().max() <= 1e-5, case
        for name, gradient in expected.gradients.items():
            difference = (four_ranks.tensors[f"{case}/grad/{name}"] - gradient).abs().max()
            assert difference <= 1e-5 * max(1.0, float(gradient.abs().max())), (case, name)


@pytest.fixture(scope="module")
def balanced(folders: dict[str, Path]) -> tiny.Reference:
    """What transformers says of the losses of routers, written out token by token."""
    return tiny.reference(folders[BALANCED], tiny.make_batch(), TEMPERATURE, router=ROUTER)


@pytest.mark.parametrize("layout", layouts_of(BALANCED))
def test_losses_of_routers_are_the_same_in_every_layout(
    four_ranks: Results, balanced: tiny.Reference, layout: str
) -> None:
    for run in (*(f"{kind}balanced" for kind in KINDS), "recomputed"):
        case = f"{BALANCED}/{layout}/{run}"
        for name, gradient in balanced.gradients.items():
            difference = (four_ranks.tensors[f"{case}/grad/{name}"] - gradient).abs().max()
            assert difference <= 1e-5 * max(1.0, float(gradient.abs().max())), (case, name)


def test_the_load_of_experts_is_the_same_in_every_layout(four_ranks: Results) -> None:
    found = [tensor for name, tensor in four_ranks.tensors.items() if name.endswith("balanced/metrics")]
    assert len(found) >= len(KINDS) * sum(fits(BALANCED, layout) for layout in FEW)
    for metrics in found:
        assert (metrics - found[0]).abs().max() <= 1e-5
    most, least, _ = found[0].tolist()
    assert 0 <= least < 1 < most <= 4


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_round_trip_is_bit_equal_in_every_layout(four_ranks: Results, family: str, layout: str) -> None:
    assert four_ranks.facts[f"{family}/{layout}/round_trip/rank0"]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_tensor_is_in_one_share_and_shares_are_even(four_ranks: Results, family: str, layout: str) -> None:
    assert all(four_ranks.facts[f"{family}/{layout}/shares/rank{rank}"] for rank in range(WORLD))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_moments_gathered_and_scattered_come_back_bit_equal(four_ranks: Results, family: str, layout: str) -> None:
    assert all(four_ranks.facts[f"{family}/{layout}/moments/rank{rank}"] for rank in range(WORLD))


def test_with_sequence_parallelism_a_layer_holds_half_of_the_sequence(four_ranks: Results) -> None:
    for kind in KINDS:
        whole, part = (
            four_ranks.facts[f"{ALL_KINDS}/{layout}/{kind}12/widest/rank0"] for layout in ("tp2pp2", "tp2pp2sp")
        )
        assert part == -(-whole // 2) < whole


def test_with_context_parallelism_a_layer_holds_half_of_the_sequence(four_ranks: Results) -> None:
    for kind in KINDS:
        whole, part = (
            four_ranks.facts[f"{ALL_KINDS}/{layout}/{kind}12/widest/rank0"] for layout in ("tp2pp2", "tp1pp2cp2")
        )
        assert part == -(-whole // 2) < whole


@pytest.mark.parametrize("layout", layouts_of(ALL_KINDS))
def test_every_rank_runs_the_same_number_of_passes(four_ranks: Results, layout: str) -> None:
    for kind in KINDS:
        counts = {four_ranks.facts[f"{ALL_KINDS}/{layout}/{kind}12/passes/rank{rank}"] for rank in range(WORLD)}
        assert len(counts) == 1
        assert counts.pop() >= 1


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_model_from_scratch_is_the_same_in_every_layout(four_ranks: Results, experts: bool) -> None:
    ran = {name.split("/")[1] for name in four_ranks.tensors if name.startswith("scratch/")}
    names = [name for name in (name_of(x) for x in EVERY if for_experts(x) is experts) if name in ran]
    assert len(names) >= 3
    start = f"scratch/{names[0]}/"
    first = {k.removeprefix(start): v for k, v in four_ranks.tensors.items() if k.startswith(start)}
    assert "model.embed_tokens.weight" in first
    for layout in names[1:]:
        for name, tensor in first.items():
            assert torch.equal(four_ranks.tensors[f"scratch/{layout}/{name}"], tensor), (layout, name)
