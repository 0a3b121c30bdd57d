"""Distillation from a file to a checkpoint: from stored log-probs and live on its own responses; killed and resumed it is never killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nemo_rl_like.data.stored_logits import StoredLogits
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.loader import load_spec
from tests.stages.killing import finish, metric_lines, tensor_files, write_rows, write_tiny
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)
from tests.tiny_folders import save_llama

CHARACTERS = "0123456789+="
SPEC = """
name: distill
stages:
  - kind: teacher_logits
    data: {path: FOLDER/rows.jsonl}
    teachers: [{path: FOLDER/teacher}, {path: FOLDER/other, domain: other}]
    top_k: 4
    examples_per_shard: 48
  - kind: distill
    name: stored
    data: {path: FOLDER/rows.jsonl, validation_fraction: 0.2, stored_logits: OUTPUT/teacher_logits/logits}
    top_k: 4
    on_policy_fraction: 0
    steps: 12
    examples_per_step: 32
    validate_every_steps: 4
    optimizer: {lr: 3.0e-3}
  - kind: distill
    name: live
    data: {path: FOLDER/rows.jsonl, validation_fraction: 0.2}
    teachers: [{path: FOLDER/teacher}, {path: FOLDER/other, domain: other}]
    top_k: 4
    beta: 0.3
    sft_coef: 0.1
    sampling: {max_new_tokens: 4}
    steps: 16
    examples_per_step: 32
    validate_every_steps: 4
    optimizer: {lr: 3.0e-3}
    checkpoint: {every_steps: 4}
"""


def teacher(folder: Path, layers: int, characters: str = CHARACTERS) -> Path:
    """A random model with a tokenizer, sharp enough to be learnt from."""
    tokenizer = character_tokenizer(characters)
    save_llama(folder, len(tokenizer), layers=layers, positions=32)
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two teachers, and conversations of two domains."""
    teacher(tmp_path / "teacher", 2)
    teacher(tmp_path / "other", 4)
    draw = random.Random(1)
    rows = []
    for number in range(120):
        a, b = draw.randint(0, 99), draw.randint(0, 99)
        messages = [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]
        rows.append({"messages": messages, "domain": ("sums", "other")[number % 2]})
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(1800)
def test_a_student_comes_closer_to_its_teachers_and_survives_kills(folder: Path) -> None:
    whole, cut = folder / "whole", folder / "cut"
    log = folder / "log"
    assert finish(["run", str(write_tiny(whole, SPEC))], log, timeout_s=600) == 0, log.read_text()
    stored = StoredLogits(whole / "teacher_logits" / "logits")
    assert stored.of(119).ids.shape[1] == 4 and len(stored.origin.teachers) == 2
    lines = {stage: metric_lines(whole / stage) for stage in ("stored", "live")}
    for stage, most in (("stored", 0.8), ("live", 1.0)):
        losses = [line["validation/loss"] for line in lines[stage] if "validation/loss" in line]
        assert losses[-1] < most * losses[0], losses
    last = lines["live"][-1]
    assert 0 < last["completions/mean_length"] <= 4 and last["gap/p99"] < 1e-3
    spec = write_tiny(cut, SPEC)
    assert finish(["run", str(spec)], log, 600, fault="optimizer.mid:14") != 0
    assert finish(["run", str(spec), "--resume"], log, timeout_s=600) == 0, log.read_text()
    assert {stage: metric_lines(cut / stage) for stage in lines} == lines
    ends = [run / "live" / "checkpoints" / "step_16" for run in (cut, whole)]
    assert tensor_files(ends[0]) == tensor_files(ends[1])


def distill(folder: Path, *fields: str) -> str:
    """An override of the stages: one distill stage with these fields."""
    given = {"data": f"{{path: {folder}/rows.jsonl}}", "teachers": f"[{{path: {folder}/teacher}}]", "top_k": "4"}
    for field in fields:
        name, _, value = field.partition(": ")
        given[name] = value.replace("FOLDER", str(folder))
    return f"stages=[{{kind: distill, {', '.join(f'{k}: {v}' for k, v in given.items() if v != 'null')}}}]"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("teachers: [{path: FOLDER/none}]",), ("`teachers.0.path`", "is not a folder")),
        (("teachers: [{path: FOLDER/teacher}, {path: FOLDER/alien, domain: x}]",), ("`teachers.1.path`", "tokenizer")),
        (("top_k: 17",), ("`top_k` is 17", "16 tokens")),
        (("data: {path: FOLDER/none.jsonl}",), ("none.jsonl", "no such file")),
        (("teachers: [{path: FOLDER/teacher, domain: sums}]",), ("rows.jsonl:2", "'other'", "are sums")),
        (
            ("teachers: null", "on_policy_fraction: 0", "data: {path: FOLDER/rows.jsonl, stored_logits: FOLDER}"),
            ("`data.stored_logits`", "no manifest.json", "`teacher_logits`"),
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    folder: Path, fields: tuple[str, ...], words: tuple[str, ...]
) -> None:
    teacher(folder / "alien", 2, CHARACTERS + "ab")
    error = refusal(folder, distill(folder, *fields))
    for word in words:
        assert word in str(error), str(error)


def test_vllm_cannot_sample_a_model_from_scratch_first(folder: Path) -> None:
    assert "`model.init`" in str(refusal(folder, distill(folder), "engine.kind=vllm"))


def test_a_good_spec_reaches_the_start_of_ray(folder: Path) -> None:
    spec = load_spec(write_tiny(folder / "out", SPEC))
    with pytest.raises(AssertionError, match="Ray was started"):
        run_pipeline(spec)
