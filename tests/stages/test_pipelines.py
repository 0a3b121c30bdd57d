"""The pipelines of `configs/pipelines`, each with a few steps of a smaller model, from their first stage to what they are for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.export.check import check_bundle
from nemo_rl_like.pipeline.foresight import foresee
from nemo_rl_like.pipeline.lineage import find_lineage
from nemo_rl_like.pipeline.records import read_status
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec
from tests.tiny_folders import save_llama

ROOT = Path(__file__).parents[2]
TINY = [
    "model.init.hidden_size=64",
    "model.init.intermediate_size=96",
    "model.init.layers=1",
    "model.init.heads=2",
    "model.init.kv_heads=2",
    "model.init.max_positions=32",
]
SMALL = ["policy.threads_per_rank=1", "environment.config.test=16"]
STEPS = {
    "sft": ("steps=3", "examples_per_step=8", "optimizer.warmup_steps=1"),
    "reward_model": ("steps=2", "examples_per_step=8", "validate_every_steps=2"),
    "rl": ("steps=2", "prompts_per_step=4", "samples_per_prompt=2"),
    "sample": ("tasks=32", "prompts_per_batch=32", "min_reward=null"),
    "distill": ("steps=2", "examples_per_step=8"),
}
OWN = {"ppo": ("critic.warmup_steps=1",)}


def tiny(name: str, output: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> ExperimentSpec:
    """The pipeline with few steps, so that each stage still does all that it does; `changes` instead of a smaller model from scratch."""
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs/pipelines" / f"{name}.yaml"
    stages = [(stage.name or stage.kind, stage.kind) for stage in load_spec(path).stages]
    few = [f"stages.{n}.{line}" for n, kind in stages for line in (*STEPS.get(kind, ()), *OWN.get(n, ()))]
    return load_spec(path, [*(changes or TINY), *SMALL, f"output={output}", *few])


def accuracies(run: Path) -> dict[str, float]:
    """Held-out greedy accuracy of each checkpoint that the run's evaluations name."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in run.glob("*/report/report.json")]
    return {name: found["metrics"]["eval/accuracy"] for report in reports for name, found in report["results"].items()}


def ran(spec: ExperimentSpec) -> dict[str, str]:
    return {o.name: o.action for o in run_pipeline(spec, start="resume", plain=True).stages}


def at_full_size(name: str, output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Accuracies of a pipeline as it is shipped."""
    monkeypatch.chdir(ROOT)
    ran(load_spec(ROOT / f"configs/pipelines/{name}.yaml", [f"output={output}"]))
    return accuracies(output)


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_rlhf_in_one_command_and_again_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny("rlhf", tmp_path / "out", monkeypatch)
    assert set(ran(spec).values()) == {"run"}
    assert {one.wire.name: one.action for one in foresee(spec)} == ran(spec)
    assert set(ran(spec).values()) == {"skip"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "out/export/model")
    lineage: Any = find_lineage(tmp_path / "out/export")
    assert list(lineage["stages"]) == ["sft", "reward_model", "ppo", "export"]
    assert "file.data.path" in lineage["stages"]["reward_model"]["made_from"]
    assert lineage["stages"]["ppo"]["metrics"]["step"] == 2
    assert "eval/accuracy" in lineage["evaluations"]["evaluate"]["ppo"]


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_a_student_of_another_size_learns_from_a_teacher_of_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("distil_reasoner", tmp_path / "out", monkeypatch)
    assert set(ran(spec).values()) == {"run"}
    records = read_status(tmp_path / "out").stages
    assert records["student"].made_from["model.init.layers"] == "1"
    assert records["teacher"].made_from["model.init.layers"] == "3"
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out/export/model")
    assert student.config.hidden_size == 64
    lineage: Any = find_lineage(tmp_path / "out/export")
    assert list(lineage["stages"]) == ["teacher_sft", "teacher", "sample", "student_sft", "student", "export"]
    assert lineage["stages"]["student"]["inputs"] == ["student_sft", "sample", "teacher"]


@pytest.mark.service
@pytest.mark.timeout(600)
def test_grpo_ends_in_bundles_that_pass_their_own_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny("grpo_nim", tmp_path / "out", monkeypatch, *TINY, "stages.sft.optimizer.decay_steps=2")
    assert {one.wire.name: one.action for one in foresee(spec)} == ran(spec)
    assert {one.wire.name: one.action for one in foresee(spec)} == ran(spec) and set(ran(spec).values()) == {"skip"}
    bundles = tmp_path / "out/export/bundles"
    for kind in ("nim", "triton-python"):
        report = check_bundle(bundles / kind)
        assert (report.kind, list(report.problems)) == (kind, [])
        lineage: Any = find_lineage(bundles / kind)
        assert list(lineage["stages"]) == ["sft", "grpo"] and "evaluate" in lineage["evaluations"]
    (tmp_path / "copy").mkdir()
    shutil.copytree(bundles / "nim", tmp_path / "copy/nim")
    assert find_lineage(tmp_path / "copy/nim") == lineage | {"stage": "export"}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_adapters_are_merged_for_triton_and_exported_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = character_tokenizer("0123456789+=")
    save_llama(tmp_path / "base", len(tokenizer), layers=2, positions=32)
    tokenizer.save_pretrained(str(tmp_path / "base"))
    changes = (f"model.path={tmp_path / 'base'}", "engine.max_context=32", "stages.export.targets.0.max_model_len=32")
    spec = tiny("lora_triton", tmp_path / "out", monkeypatch, *changes)
    assert set(ran(spec).values()) == {"run"}
    bundles = tmp_path / "out/export/bundles"
    for kind in ("triton-vllm", "triton-python", "hf-lora"):
        report = check_bundle(bundles / kind)
        assert (report.kind, list(report.problems)) == (kind, [])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(base, bundles / "hf-lora")
    (config,) = (bundles / "triton-vllm").rglob("config.json")
    merged = AutoModelForCausalLM.from_pretrained(config.parent)
    ids = torch.arange(4, 12)[None]
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(3000)
def test_the_three_stage_classic_learns_at_full_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = at_full_size("rlhf", tmp_path / "out", monkeypatch)
    assert found["ppo"] > found["sft"] + 0.2


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(3000)
def test_a_student_comes_near_its_teacher_at_full_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = at_full_size("distil_reasoner", tmp_path / "out", monkeypatch)
    assert found["teacher"] > found["teacher_sft"] + 0.2
    assert found["student"] > found["student_sft"] + 0.2
    assert found["student"] > found["teacher"] - 0.05
