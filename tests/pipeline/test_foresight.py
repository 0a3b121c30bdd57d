"""Laws of foresight: what is foretold is what happens, and telling it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import StoppedBySignal
from nemo_rl_like.artifacts.lineage import lineage_text
from nemo_rl_like.pipeline.foresight import foresee
from nemo_rl_like.pipeline.lineage import find_lineage, lineage_of
from nemo_rl_like.pipeline.runner import run_pipeline
from tests.pipeline import counting
from tests.pipeline.counting import CLASSES, STOP, Interruption
from tests.pipeline.specs import chain

DONE = {"sft": "skip", "rl": "skip", "evaluate": "skip", "export": "skip"}
AGAIN = {"sft": "run", "rl": "run", "evaluate": "run", "export": "run"}


def told(output: Path, **changes: Any) -> dict[str, str]:
    return {one.wire.name: one.action for one in foresee(chain(output, **changes))}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_before_the_first_start_everything_is_run_and_nothing_is_made(tmp_path: Path) -> None:
    assert told(tmp_path / "out") == AGAIN
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "actions"),
    [
        ({}, DONE),
        ({"stages": {"rl": {"steps": 3}}}, {**AGAIN, "sft": "skip"}),
        ({"stages": {"export": {"shard_gib": 1.0}}}, {**DONE, "export": "run"}),
        ({"stages": {"rl": {"settings": {"policy": {"threads_per_rank": 1}}}}}, DONE),
        ({"stages": {"rl": {"settings": {"policy": {"lora": {"rank": 2}}}}}}, {**AGAIN, "sft": "skip"}),
        ({"seed": 2}, AGAIN),
        ({"code": "source"}, AGAIN),
    ],
)
def test_what_is_foretold_is_what_happens(tmp_path: Path, changes: dict[str, Any], actions: dict[str, str]) -> None:
    output = tmp_path / "out"
    run_pipeline(chain(output), classes=CLASSES)
    before = everything(output)
    assert told(output, **changes) == actions
    assert everything(output) == before
    result = run_pipeline(chain(output, **changes), start="resume", classes=CLASSES)
    assert {o.name: o.action for o in result.stages} == actions


def test_what_stands_behind_a_stage_that_is_resumed_waits_for_it(tmp_path: Path) -> None:
    output = tmp_path / "out"
    run_pipeline(chain(output), classes=CLASSES)
    (output / "sft/out/digest.txt").unlink()
    assert told(output) == {"sft": "resume", "rl": "wait", "evaluate": "wait", "export": "wait"}
    result = run_pipeline(chain(output), start="resume", classes=CLASSES)
    assert {o.name: o.action for o in result.stages} == {**DONE, "sft": "resume"}


def test_a_stopped_stage_is_resumed(tmp_path: Path) -> None:
    Interruption.error = STOP
    with pytest.raises(StoppedBySignal):
        run_pipeline(chain(tmp_path / "out"), classes=CLASSES)
    assert told(tmp_path / "out") == {**AGAIN, "sft": "resume"}


def test_every_change_is_named(tmp_path: Path) -> None:
    run_pipeline(chain(tmp_path / "out"), classes=CLASSES)
    changed = chain(tmp_path / "out", {"rl": {"steps": 3, "samples_per_prompt": 4}})
    rl = foresee(changed)[1]
    assert set(rl.changes) == {"stage.samples_per_prompt: 8 -> 4", "stage.steps: 2 -> 3"}


def test_a_missing_file_blocks_a_stage_and_names_the_field(tmp_path: Path) -> None:
    found = foresee(chain(tmp_path / "out", {"sft": {"data": {"path": str(tmp_path / "none.jsonl")}}}))
    assert found[0].action == "blocked" and "`data.path`" in found[0].reason


def test_a_bundle_leads_back_to_data_spec_code_and_evaluation(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": []}) + "\n")
    spec = chain(tmp_path / "out", {"sft": {"data": {"path": str(data)}}})
    run_pipeline(spec, classes=CLASSES)
    (tmp_path / "out/sft/metrics.jsonl").write_text('{"step": 3, "loss": 0.5, "timing/step": 1.0}\n')
    found = find_lineage(tmp_path / "out/export/out")
    assert found == lineage_of(spec, tmp_path / "out", "export") == json.loads(lineage_text(found))
    stages: Any = found["stages"]
    assert list(stages) == ["sft", "rl", "export"]
    assert stages["export"]["inputs"] == ["rl"] and stages["rl"]["inputs"] == ["sft"]
    assert len(stages["sft"]["made_from"]["file.data.path"]) == 64
    assert stages["sft"]["metrics"] == {"step": 3, "loss": 0.5}
    assert stages["rl"]["code"]["version"] and stages["rl"]["output"]["content_hash"]
    evaluations: Any = found["evaluations"]
    assert list(evaluations) == ["evaluate"]


def test_a_copied_bundle_carries_its_lineage(tmp_path: Path) -> None:
    spec = chain(tmp_path / "out")
    run_pipeline(spec, classes=CLASSES)
    bundle = tmp_path / "elsewhere"
    bundle.mkdir()
    (bundle / "lineage.json").write_text(lineage_text(lineage_of(spec, tmp_path / "out", "export")))
    assert find_lineage(bundle) == lineage_of(spec, tmp_path / "out", "export")


def test_a_stage_gets_the_lineage_of_what_it_builds_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[str]] = {}

    def start(context: Any, inputs: object) -> str:
        return str(seen.setdefault(context.stage_name, list(context.lineage["stages"])))

    monkeypatch.setattr(counting, "start", start)
    run_pipeline(chain(tmp_path / "out"), classes=CLASSES)
    assert seen == {"sft": [], "rl": ["sft"], "evaluate": ["sft", "rl"], "export": ["sft", "rl"]}
