"""The pretrain stage on Ray, from a trained tokenizer to a checkpoint; killed and resumed it is never killed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from nemo_rl_like.checkpoint.layout import verify
from tests.stages.killing import finish
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)

SPEC = """
name: pretrained
seed: 3
output: {output}
model:
  init: {{hidden_size: 64, intermediate_size: 96, layers: 2, heads: 2, kv_heads: 2, head_dim: 32, max_positions: 64}}
  tokenizer: {{path: {folder}/tokenizer}}
policy: {{threads_per_rank: 1}}
stages:
  - kind: pretrain
    data: {{paths: [{folder}/text.txt], validation_fraction: 0.2}}
    steps: 8
    rows_per_step: 4
    sequence_tokens: 32
    z_loss: 1.0e-4
    validate_every_steps: 4
    optimizer: {{lr: 3.0e-3}}
    checkpoint: {{every_steps: 3}}
"""


def written(folder: Path, output: Path) -> Path:
    """Sentences of few words, and a spec that trains on them."""
    draw = random.Random(1)
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "to", "mat", "hat", "and"]
    texts = [" ".join(draw.choice(words) for _ in range(draw.randint(3, 30))) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    path = folder / f"{output.name}.yaml"
    path.write_text(SPEC.format(output=output, folder=folder))
    return path


def outcome(output: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """sha256 by file of the last checkpoint, and metric lines without timings."""
    manifest = verify(output / "pretrain" / "checkpoints" / "step_8")
    lines = (output / "pretrain" / "metrics.jsonl").read_text().splitlines()
    metrics = [{k: v for k, v in json.loads(line).items() if not k.startswith("timing/")} for line in lines]
    return {f.path: f.sha256 for f in manifest.files if f.path.endswith(".safetensors")}, metrics


@pytest.mark.service
@pytest.mark.timeout(900)
def test_killed_and_resumed_is_never_killed(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    spec = written(tmp_path, whole)
    tokenizer = [
        "tokenizer",
        "train",
        str(tmp_path / "text.txt"),
        "--size",
        "280",
        "--out",
        str(tmp_path / "tokenizer"),
    ]
    assert finish(tokenizer, log) == 0, log.read_text()
    assert finish(["run", str(spec)], log, 600) == 0, log.read_text()
    weights, metrics = outcome(whole)
    assert metrics[-1]["validation/loss"] < metrics[0]["validation/loss"]
    assert metrics[-1]["perplexity"] > 1 and metrics[-1]["tokens"] > 0
    spec = written(tmp_path, cut)
    assert finish(["run", str(spec)], log, 600, fault="optimizer.mid:5") != 0
    assert finish(["run", str(spec), "--resume"], log, 600) == 0, log.read_text()
    assert outcome(cut) == (weights, metrics)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("data: {paths: [none.txt]}", "none.txt"),
        ("data: {paths: []}", "paths"),
        (
            "data: {paths: [FOLDER/text.txt]}, sequence_tokens: 4096",
            "`sequence_tokens` is 4096, more than the context of",
        ),
        (
            "data: {paths: [FOLDER/text.txt], validation_fraction: 0.001}, validate_every_steps: 1",
            "`data.validation_fraction` 0.001 holds out none of 60 documents",
        ),
        ("data: {paths: [FOLDER/text.txt]}, validate_every_steps: 1", "set it above 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path, fields: str, words: str) -> None:
    written(tmp_path, tmp_path / "unused")
    error = refusal(tmp_path, f"stages=[{{kind: pretrain, {fields.replace('FOLDER', str(tmp_path))}}}]")
    assert words in str(error), str(error)
