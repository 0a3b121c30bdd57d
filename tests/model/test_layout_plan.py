"""Laws of the planner: all that fits, nothing that does not, the least communication first, and errors that say what would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.known_shapes import KNOWN_SHAPES
from nemo_rl_like.model.layout_plan import NoLayout, Question, plan
from nemo_rl_like.spec.policy import LayoutSpec, RecomputeSpec

EIGHT = Question(KNOWN_SHAPES["llama-3.1-8b"], 8)
KEPT = replace(EIGHT, recompute=None)
SEVENTY = Question(KNOWN_SHAPES["llama-3.1-70b"], 64, micro_batch_tokens=4096)
MIXTURE = Question(KNOWN_SHAPES["qwen3-235b-a22b"], 128, micro_batch_tokens=4096)


@pytest.mark.parametrize("question", [EIGHT, SEVENTY, MIXTURE])
def test_every_planned_layout_uses_all_gpus_divides_the_model_and_fits(question: Question) -> None:
    found = plan(question, {})
    assert len({planned.layout for planned in found}) == len(found)
    for planned in found:
        layout = planned.layout
        assert layout.tp * layout.cp * layout.pp * layout.dp == question.gpus
        question.config.check_layout(layout)
        assert planned.memory.total <= 0.9 * question.gpu_gib * (1 << 30)


@pytest.mark.parametrize("question", [EIGHT, SEVENTY, MIXTURE])
def test_tensor_and_context_parallelism_stay_inside_a_node_and_the_least_model_parallelism_comes_first(
    question: Question,
) -> None:
    found = plan(question, {})
    inside = [planned.layout.tp * planned.layout.cp <= question.gpus_per_node for planned in found]
    assert inside == sorted(inside, reverse=True)
    sizes = [p.layout.tp * p.layout.cp * p.layout.pp for p, near in zip(found, inside, strict=True) if near]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("name", "gpus", "asked"),
    [
        ("gemma-3-1b", 2, {}),
        ("gemma-2-27b", 16, {"pp": 1}),
        ("gpt-oss-20b", 8, {"etp": 1}),
        ("qwen2-57b-a14b", 32, {"tp": 2, "ep": 16, "etp": 1}),
        ("glm-4.5", 256, {"tp": 4, "cp": 1, "ep": 32, "etp": 1}),
        ("deepseek-v3", 512, {"tp": 8, "cp": 1, "ep": 64, "etp": 1}),
    ],
)
def test_models_of_every_kind_are_planned(name: str, gpus: int, asked: dict[str, int]) -> None:
    found = plan(Question(KNOWN_SHAPES[name], gpus, micro_batch_tokens=4096), asked)
    for planned in found:
        sizes = {**planned.layout.model_dump(), "etp": planned.layout.expert_tp}
        assert planned.fits and asked.items() <= sizes.items()


def test_smaller_gpus_need_more_model_parallelism() -> None:
    large, small = (plan(replace(SEVENTY, gpu_gib=gib), {})[0].layout for gib in (141.0, 80.0))
    assert large.tp * large.cp * large.pp < small.tp * small.cp * small.pp


def test_context_parallelism_makes_long_micro_batches_fit() -> None:
    """32768 tokens with tp 2 on 8 GPUs: not with all the rest in dp or pp, but with it in cp, which cuts activations alone."""
    long = replace(KEPT, micro_batch_tokens=32768)
    with pytest.raises(NoLayout, match="nearest that fit: .*cp: 2"):
        plan(long, {"tp": 2, "cp": 1})
    (fitting,) = plan(long, {"tp": 2, "pp": 1})
    assert fitting.layout == LayoutSpec(tp=2, cp=4, sp=True) and "tp * cp inside a node" in fitting.reasons
    alone = long.training(LayoutSpec(tp=2, sp=True)).peak(LayoutSpec(tp=2, sp=True))
    assert fitting.memory.parameters == alone.parameters
    assert fitting.memory.activations == pytest.approx(alone.activations / 4, rel=0.02)


def test_the_bubble_is_that_of_the_pipeline_schedule() -> None:
    for vpp in (1, 2):
        (planned, *_) = plan(EIGHT, {"tp": 2, "pp": 4, "vpp": vpp})
        assert planned.micro_batches == (1 << 20) // 16384
        assert planned.bubble == pytest.approx(3 / (vpp * 64 + 3))


def test_stages_are_interleaved_where_layers_divide_and_micro_batches_go_round_the_ranks() -> None:
    assert {p.layout.vpp for p in plan(EIGHT, {"pp": 2})} == {1, 2, 4}
    few = replace(EIGHT, step_tokens=16384)
    assert {p.layout.vpp for p in plan(few, {"pp": 2})} == {1}


def test_sizes_asked_for_are_kept() -> None:
    assert {planned.layout.pp for planned in plan(SEVENTY, {"pp": 4})} == {4}
    for asked in ({"ep": 16, "etp": 1}, {"ep": 32, "etp": 2, "tp": 4}):
        assert {(p.layout.ep, p.layout.expert_tp) for p in plan(MIXTURE, asked)} == {(asked["ep"], asked["etp"])}


def test_what_does_not_fit_says_what_it_needs_and_what_comes_nearest() -> None:
    with pytest.raises(
        NoLayout, match=r"needs .* GiB a GPU \(parameters 15.0, gradients 29.9, .* and has 72.0"
    ) as caught:
        plan(KEPT, {"tp": 1, "pp": 1, "cp": 1})
    assert "it fits with --micro-batch-tokens" in caught.value.problem
    assert caught.value.nearest[0].layout in {planned.layout for planned in plan(KEPT, {})}


@pytest.mark.parametrize("question", [KEPT, replace(EIGHT, micro_batch_tokens=1 << 18)])
def test_the_smaller_micro_batch_that_it_names_does_fit(question: Question) -> None:
    with pytest.raises(NoLayout) as caught:
        plan(question, {"tp": 1, "pp": 1, "cp": 1})
    tokens = int(caught.value.problem.rpartition(" ")[2])
    assert plan(replace(question, micro_batch_tokens=tokens), {"tp": 1, "pp": 1, "cp": 1})
    with pytest.raises(NoLayout):
        plan(replace(question, micro_batch_tokens=2 * tokens), {"tp": 1, "pp": 1, "cp": 1})


def test_layers_are_computed_again_only_where_no_layout_fits_without_and_then_as_few_as_fit() -> None:
    assert all(planned.recompute is None for planned in plan(EIGHT, {}))
    crowded = replace(EIGHT, gpus=4, micro_batch_tokens=65536)
    with pytest.raises(NoLayout):
        plan(replace(crowded, recompute=None), {})
    found = plan(crowded, {})
    shares = []
    for planned in found:
        again, layers = planned.again
        assert planned.fits and again > 0 and f"{again} of {layers} layers computed again" in planned.reasons
        for fewer in range(1, again):
            kept = crowded.training(planned.layout, RecomputeSpec(layers=fewer)).peak(planned.layout)
            assert kept.total > crowded.usable
        shares.append(again / layers)
    assert shares == sorted(shares)


def test_the_recomputation_asked_for_is_that_of_every_layout() -> None:
    experts = RecomputeSpec(kind="selective", modules=("moe",))
    kept, again = (plan(replace(MIXTURE, recompute=each), {}) for each in (None, experts))
    assert {planned.recompute for planned in again} == {experts}
    assert {planned.layout for planned in kept} < {planned.layout for planned in again}


@pytest.mark.parametrize(
    ("question", "asked", "why"),
    [
        (replace(EIGHT, gpus=6), {"tp": 3}, "layout.tp is 3, which does not divide the model's heads"),
        (EIGHT, {"tp": 3}, "tp 3 does not divide the 8 GPUs"),
        (EIGHT, {"tp": 4, "pp": 4}, r"tp 4 \* pp 4 does not divide the 8 GPUs"),
        (replace(EIGHT, gpus=64), {"pp": 64}, "layout.pp is 64, which leaves a stage without one of the 32 layers"),
        (EIGHT, {"ep": 2}, "the model has no experts"),
        (MIXTURE, {"ep": 3}, "which does not divide"),
    ],
)
def test_what_does_not_divide_says_why(question: Question, asked: dict[str, int], why: str) -> None:
    with pytest.raises(NoLayout, match=why) as caught:
        plan(question, asked)
    assert isinstance(caught.value, InputError)


def test_a_model_that_fits_nowhere_names_no_layout() -> None:
    with pytest.raises(NoLayout, match="take more GPUs") as caught:
        plan(replace(SEVENTY, gpus=2), {})
    assert caught.value.nearest == ()


def test_sequence_parallelism_is_planned_wherever_it_can_be() -> None:
    layouts = {planned.layout for planned in plan(replace(EIGHT, micro_batch_tokens=2048), {})}
    assert all(layout.sp == (layout.tp > 1) for layout in layouts)
    assert {LayoutSpec(pp=2, dp=4), LayoutSpec(tp=2, dp=4, sp=True)} <= layouts
