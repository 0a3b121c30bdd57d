"""Laws of planning: what a stage builds on, types that fit, and problems found before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.pipeline.planner import make_plan
from nemo_rl_like.pipeline.wiring import wire
from nemo_rl_like.spec.experiment import ExperimentSpec, stage_name
from tests.pipeline.counting import CLASSES
from tests.pipeline.specs import CHAIN, chain


def spec_of(*stages: dict[str, Any]) -> ExperimentSpec:
    return ExperimentSpec.model_validate({**CHAIN, "output": "x", "stages": stages})


SFT: dict[str, Any] = {"kind": "sft", "data": {"environment_demonstrations": True}}


def test_by_default_a_stage_builds_on_the_last_checkpoint_and_an_evaluation_on_all() -> None:
    spec = spec_of(
        SFT, {"kind": "evaluate", "name": "e1"}, {"kind": "rl"}, {"kind": "evaluate", "name": "e2"}, {"kind": "export"}
    )
    assert {w.name: w.sources for w in wire(spec)} == {
        "sft": (),
        "e1": ("sft",),
        "rl": ("sft",),
        "e2": ("sft", "rl"),
        "export": ("rl",),
    }


def test_named_sources_win() -> None:
    spec = spec_of(
        SFT, {"kind": "rl"}, {"kind": "rl", "name": "b", "init_from": "sft"}, {"kind": "export", "checkpoint": "rl"}
    )
    assert [w.sources for w in wire(spec)] == [(), ("sft",), ("sft",), ("rl",)]


def test_an_sft_stage_trains_on_the_last_sample_stage_or_on_the_named_one() -> None:
    second = {"kind": "sample", "name": "second"}
    rest = ({"kind": "sft", "name": "b"}, {"kind": "sft", "name": "c", "data": {"from_stage": "sample"}})
    found = {w.name: w.sources for w in wire(spec_of(SFT, {"kind": "sample"}, second, *rest, {"kind": "evaluate"}))}
    assert found["sample"] == found["second"] == ("sft",)
    assert found["b"] == ("sft", "second")
    assert found["c"] == ("b", "sample")
    assert found["evaluate"] == ("sft", "b", "c")


OTHER: dict[str, Any] = {"model": {"init": {"layers": 2}, "tokenizer": {"characters": "01"}}}


def test_a_stage_starts_from_the_last_checkpoint_of_its_own_model() -> None:
    teacher = {**SFT, "name": "teacher", "settings": OTHER}
    teachers = [{"stage": "teacher"}]
    student = {"kind": "distill", "data": {"path": "x"}, "teachers": teachers}
    more = {"kind": "rl", "name": "more", "settings": OTHER}
    found = {w.name: w for w in wire(spec_of(SFT, teacher, student, more, {"kind": "evaluate"}, {"kind": "export"}))}
    assert (found["teacher"].sources, found["teacher"].start) == ((), None)
    assert (found["distill"].sources, found["distill"].start) == (("sft", "teacher"), "sft")
    assert (found["more"].sources, found["more"].start) == (("teacher",), "teacher")
    assert found["evaluate"].sources == ("sft", "distill")
    assert found["export"].sources == ("more",)


def test_a_dtype_makes_no_other_model() -> None:
    model = {**CHAIN["model"], "dtype": "bfloat16"}
    assert wire(spec_of(SFT, {"kind": "rl", "settings": {"model": model}}))[1].start == "sft"


def test_what_a_stage_starts_from_is_told_from_its_other_checkpoints() -> None:
    own = {"kind": "distill", "data": {"path": "x"}, "teachers": [{"stage": "a"}], "init_from": "b"}
    a, b = {**SFT, "name": "a"}, {**SFT, "name": "b", "init_from": "a"}
    last = wire(spec_of(a, b, own))[-1]
    assert (last.sources, last.start) == (("b", "a"), "b")
    same = wire(spec_of(a, b, {**own, "init_from": "a"}))[-1]
    assert (same.sources, same.start) == (("a",), "a")


def test_stored_log_probs_are_an_input() -> None:
    made = {"kind": "teacher_logits", "data": {"path": "x"}, "teachers": [{"stage": "sft"}]}
    read = {"kind": "distill", "data": {"path": "x", "stored_logits_stage": "teacher_logits"}, "on_policy_fraction": 0}
    assert wire(spec_of(SFT, made, read))[-1].sources == ("sft", "teacher_logits")


def test_an_evaluation_alone_is_of_the_model_itself() -> None:
    assert [w.sources for w in wire(spec_of({"kind": "evaluate"}))] == [()]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([SFT, {"kind": "rl", "init_from": "stf"}], "there is no stage 'stf'; did you mean `sft`"),
        ([{"kind": "rl", "init_from": "sft"}, SFT], "'sft' does not come before stage 'rl'"),
        ([{"kind": "rl", "init_from": "rl"}], "'rl' does not come before stage 'rl'"),
        (
            [SFT, {"kind": "evaluate"}, {"kind": "rl", "init_from": "evaluate"}],
            "'evaluate' makes no checkpoint; give one of sft",
        ),
        (
            [SFT, {"kind": "evaluate", "checkpoints": ["sft", "x"]}],
            "stages.evaluate.checkpoints: there is no stage 'x'",
        ),
        ([{"kind": "sft"}], "stages.sft.data: no source; give `path`"),
        (
            [{"kind": "sft", "data": {"from_stage": "sample"}}, {"kind": "sample"}],
            "stages.sft.data.from_stage: stage 'sample' does not come before stage 'sft'; no stage before it makes a dataset",
        ),
        (
            [{"kind": "sample"}, {"kind": "sft", "data": {"from_stage": "sampel"}}],
            "there is no stage 'sampel'; did you mean `sample`?; give one of sample",
        ),
        ([SFT, {"kind": "sft", "name": "b", "data": {"from_stage": "sft"}}], "stage 'sft' makes no dataset"),
        ([{"kind": "sample"}, {"kind": "rl", "init_from": "sample"}], "stage 'sample' makes no checkpoint"),
        ([{"kind": "evaluate"}, {"kind": "export"}], "no stage before it makes a checkpoint to export"),
        (
            [SFT, {"kind": "rl", "settings": OTHER, "init_from": "sft"}],
            "stages.rl.init_from: stage 'sft' has another model than this one (`settings.model`)",
        ),
        (
            [{**SFT, "settings": OTHER}, {"kind": "evaluate", "checkpoints": ["sft"]}],
            "stages.evaluate.checkpoints: stage 'sft' has another model",
        ),
        ([{**SFT, "name": "../x"}], "cannot name a folder"),
        ([{**SFT, "name": "run.json"}], "cannot name a folder"),
        ([{**SFT, "name": ".nrl-run"}], "cannot name a folder"),
    ],
)
def test_a_wrong_reference_or_name_is_told_with_what_would_be_right(stages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        wire(spec_of(*stages))
    assert words in str(caught.value)


def test_a_stage_that_takes_another_type_than_its_source_makes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"stages\.rl: takes ServingBundle, but stage 'sft' makes Checkpoint"):
        make_plan(chain(tmp_path), {**CLASSES, "rl": "tests.pipeline.counting:Greedy"})


def test_each_stage_sees_its_own_blocks(tmp_path: Path) -> None:
    spec = chain(tmp_path, {"rl": {"settings": {"policy": {"micro_batch_tokens": 7}}}})
    seen = {stage_name(s): spec.for_stage(s) for s in spec.stages}
    assert {n: s.policy.micro_batch_tokens for n, s in seen.items()} == {
        "sft": 16384,
        "rl": 7,
        "evaluate": 16384,
        "export": 16384,
    }
    others = {stage_name(s): seen["rl"].for_stage(s).policy.micro_batch_tokens for s in seen["rl"].stages}
    assert others == {n: s.policy.micro_batch_tokens for n, s in seen.items()}


def test_problems_of_all_stages_are_told_at_once(tmp_path: Path) -> None:
    plan = make_plan(chain(tmp_path, {"sft": {"steps": 13}, "rl": {"steps": 13}}), CLASSES)
    with pytest.raises(InputError, match=r"1 problem.*\n  stages\.sft: `steps` is 13"):
        plan.preflight()
