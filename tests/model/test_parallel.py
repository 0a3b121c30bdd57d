"""Laws over tensor, pipeline and data parallelism, on four gloo ranks started once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model import tiny
from tests.model.parallel_rank import KINDS, LAYOUTS, TEMPERATURE, WORLD, Results, name_of

pytestmark = pytest.mark.timeout(500)
LAYOUT_NAMES = [name_of(layout) for layout in LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_equal_hugging_face_in_every_layout(
    four_ranks: Results, folders: dict[str, Path], family: str, layout: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(folders[family]), dtype=torch.float32)
    rows = [list(range(40)), [3, 1, 4], [7]]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])
    assert (four_ranks.tensors[f"{family}/{layout}/logits"] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logprobs_and_gradients_are_the_same_in_every_layout(
    four_ranks: Results, folders: dict[str, Path], family: str, layout: str
) -> None:
    expected = tiny.reference(folders[family], tiny.make_batch(), TEMPERATURE)
    for kind in KINDS if family == "qwen3" else KINDS[-1:]:
        for budget in (12, 4096):
            case = f"{family}/{layout}/{kind}{budget}"
            assert (four_ranks.tensors[f"{case}/logprobs"] - expected.logprobs).abs().max() <= 1e-5, case
            for name, gradient in expected.gradients.items():
                difference = (four_ranks.tensors[f"{case}/grad/{name}"] - gradient).abs().max()
                assert difference <= 1e-5 * max(1.0, float(gradient.abs().max())), (case, name)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_round_trip_is_bit_equal_in_every_layout(four_ranks: Results, family: str, layout: str) -> None:
    assert four_ranks.facts[f"{family}/{layout}/round_trip/rank0"]


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_moments_gathered_and_scattered_come_back_bit_equal(four_ranks: Results, family: str, layout: str) -> None:
    assert all(four_ranks.facts[f"{family}/{layout}/moments/rank{rank}"] for rank in range(WORLD))


def test_with_sequence_parallelism_a_layer_holds_half_of_the_sequence(four_ranks: Results) -> None:
    for kind in KINDS:
        whole, part = (four_ranks.facts[f"qwen3/{layout}/{kind}4096/widest/rank0"] for layout in ("tp2pp1", "tp2pp1sp"))
        assert part == -(-whole // 2) < whole


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_every_rank_runs_the_same_number_of_passes(four_ranks: Results, layout: str) -> None:
    for kind in KINDS:
        counts = {four_ranks.facts[f"qwen3/{layout}/{kind}12/passes/rank{rank}"] for rank in range(WORLD)}
        assert len(counts) == 1
        assert counts.pop() >= 1


def test_a_model_from_scratch_is_the_same_in_every_layout(four_ranks: Results) -> None:
    first = {k.split("/", 2)[2]: v for k, v in four_ranks.tensors.items() if k.startswith("scratch/tp1pp1/")}
    assert "model.embed_tokens.weight" in first
    for layout in LAYOUT_NAMES[1:]:
        for name, tensor in first.items():
            assert torch.equal(four_ranks.tensors[f"scratch/{layout}/{name}"], tensor), (layout, name)
