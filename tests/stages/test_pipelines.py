"""The pipelines of `configs/pipelines`, each with a few steps of a smaller model, from their first stage to what they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from nemo_rl_like.pipeline.foresight import foresee
from nemo_rl_like.pipeline.lineage import find_lineage
from nemo_rl_like.pipeline.records import read_status
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec

ROOT = Path(__file__).parents[2]
TINY = [
    "model.init.hidden_size=64",
    "model.init.intermediate_size=96",
    "model.init.layers=1",
    "model.init.heads=2",
    "model.init.kv_heads=2",
    "model.init.max_positions=32",
    "policy.threads_per_rank=1",
    "environment.config.test=16",
]
STEPS = {
    "sft": ("steps=3", "examples_per_step=8", "optimizer.warmup_steps=1"),
    "reward_model": ("steps=2", "examples_per_step=8", "validate_every_steps=2"),
    "rl": ("steps=2", "prompts_per_step=4", "samples_per_prompt=2"),
    "sample": ("tasks=32", "prompts_per_batch=32", "min_reward=null"),
    "distill": ("steps=2", "examples_per_step=8"),
}
OWN = {"ppo": ("critic.warmup_steps=1",)}


def tiny(name: str, output: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentSpec:
    """The pipeline with few steps, so that each stage still does all that it does."""
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs/pipelines" / f"{name}.yaml"
    stages = [(stage.name or stage.kind, stage.kind) for stage in load_spec(path).stages]
    few = [f"stages.{n}.{line}" for n, kind in stages for line in (*STEPS.get(kind, ()), *OWN.get(n, ()))]
    return load_spec(path, [*TINY, f"output={output}", *few])


def ran(spec: ExperimentSpec) -> dict[str, str]:
    return {o.name: o.action for o in run_pipeline(spec, start="resume", plain=True).stages}


@pytest.mark.service
@pytest.mark.timeout(600)
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


@pytest.mark.service
@pytest.mark.timeout(600)
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
