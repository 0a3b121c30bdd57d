"""Laws of planning: what a stage builds on, types that fit, and problems found before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.pipeline.planner import make_plan
from nemo_rl_like.pipeline.wiring import wire
from nemo_rl_like.spec.experiment import ExperimentSpec
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


def test_problems_of_all_stages_are_told_at_once(tmp_path: Path) -> None:
    plan = make_plan(chain(tmp_path, {"sft": {"steps": 13}, "rl": {"steps": 13}}), CLASSES)
    with pytest.raises(InputError, match=r"1 problem.*\n  stages\.sft: `steps` is 13"):
        plan.preflight()
