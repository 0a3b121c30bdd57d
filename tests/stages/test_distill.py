"""Distillation from a file to a checkpoint: from stored log-probs and live on its own responses; killed and resumed it is never killed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from nemo_rl_like.checkpoint.layout import verify
from nemo_rl_like.data.stored_logits import StoredLogits
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.loader import load_spec
from tests.stages.killing import finish
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)
from tests.tiny_folders import save_llama

CHARACTERS = "0123456789+="
SPEC = """
name: distill
seed: 3
output: {output}
model:
  init: {{hidden_size: 64, intermediate_size: 96, layers: 2, heads: 2, kv_heads: 2, head_dim: 32, max_positions: 32}}
  tokenizer: {{characters: "0123456789+="}}
policy: {{threads_per_rank: 1}}
stages:
  - kind: teacher_logits
    data: {{path: {folder}/rows.jsonl}}
    teachers: [{{path: {folder}/teacher}}, {{path: {folder}/other, domain: other}}]
    top_k: 4
    examples_per_shard: 48
  - kind: distill
    name: stored
    data: {{path: {folder}/rows.jsonl, validation_fraction: 0.2, stored_logits: {output}/teacher_logits/logits}}
    top_k: 4
    on_policy_fraction: 0
    steps: 12
    examples_per_step: 32
    validate_every_steps: 4
    optimizer: {{lr: 3.0e-3}}
  - kind: distill
    name: live
    data: {{path: {folder}/rows.jsonl, validation_fraction: 0.2}}
    teachers: [{{path: {folder}/teacher}}, {{path: {folder}/other, domain: other}}]
    top_k: 4
    beta: 0.3
    sft_coef: 0.1
    sampling: {{max_new_tokens: 4}}
    steps: 16
    examples_per_step: 32
    validate_every_steps: 4
    optimizer: {{lr: 3.0e-3}}
    checkpoint: {{every_steps: 4}}
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
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def written(folder: Path, output: Path) -> Path:
    path = folder / f"{output.name}.yaml"
    path.write_text(SPEC.format(output=output, folder=folder))
    return path


def lines(output: Path, stage: str) -> list[dict[str, float]]:
    """Metric lines without timings."""
    text = (output / stage / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("timing/")} for line in text.splitlines()]


def weights(output: Path) -> dict[str, str]:
    """sha256 by file of the last checkpoint: weights and optimizer."""
    manifest = verify(output / "live" / "checkpoints" / "step_16")
    return {f.path: f.sha256 for f in manifest.files if f.path.endswith(".safetensors")}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(1800)
def test_a_student_comes_closer_to_its_teachers_and_survives_kills(folder: Path) -> None:
    whole, cut = folder / "whole", folder / "cut"
    log = folder / "log"
    assert finish(["run", str(written(folder, whole))], log, timeout_s=600) == 0, log.read_text()
    stored = StoredLogits(whole / "teacher_logits" / "logits")
    assert stored.of(119).ids.shape[1] == 4 and len(stored.origin.teachers) == 2
    for stage in ("stored", "live"):
        losses = [line["validation/loss"] for line in lines(whole, stage) if "validation/loss" in line]
        assert losses[-1] < losses[0], losses
    assert lines(whole, "stored")[-1]["validation/loss"] < 0.8 * lines(whole, "stored")[0]["validation/loss"]
    last = lines(whole, "live")[-1]
    assert 0 < last["completions/mean_length"] <= 4 and last["gap/p99"] < 1e-3
    spec = written(folder, cut)
    assert finish(["run", str(spec)], log, 600, fault="optimizer.mid:14") != 0
    assert finish(["run", str(spec), "--resume"], log, timeout_s=600) == 0, log.read_text()
    assert weights(cut) == weights(whole)
    assert lines(cut, "live") == lines(whole, "live") and lines(cut, "stored") == lines(whole, "stored")


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
    spec = load_spec(written(folder, folder / "out"))
    with pytest.raises(AssertionError, match="Ray was started"):
        run_pipeline(spec)
