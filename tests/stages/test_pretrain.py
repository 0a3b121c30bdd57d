"""The pretrain stage on Ray, from a trained tokenizer to a checkpoint; killed and resumed it is never killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.stages.killing import TINY, finish, metric_lines, tensor_files, write_tiny
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)

HEAD = TINY.replace('characters: "0123456789+="', "path: FOLDER/tokenizer").replace(
    "max_positions: 32", "max_positions: 64"
)
SPEC = """
name: pretrained
stages:
  - kind: pretrain
    data: {paths: [FOLDER/text.txt], validation_fraction: 0.2}
    steps: 8
    rows_per_step: 4
    sequence_tokens: 32
    z_loss: 1.0e-4
    validate_every_steps: 4
    optimizer: {lr: 3.0e-3}
    checkpoint: {every_steps: 3}
"""


def written(output: Path) -> Path:
    """Sentences of few words, and a spec that trains on them."""
    draw = random.Random(1)
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "to", "mat", "hat", "and"]
    texts = [" ".join(draw.choice(words) for _ in range(draw.randint(3, 30))) for _ in range(60)]
    (output.parent / "text.txt").write_text("\n\n".join(texts))
    return write_tiny(output, SPEC, head=HEAD)


def outcome(output: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """Tensors of the last checkpoint, and metrics."""
    stage = output / "pretrain"
    return tensor_files(stage / "checkpoints" / "step_8"), metric_lines(stage)


@pytest.mark.service
@pytest.mark.timeout(900)
def test_killed_and_resumed_is_never_killed(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    spec = written(whole)
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
    spec = written(cut)
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
    written(tmp_path / "unused")
    error = refusal(tmp_path, f"stages=[{{kind: pretrain, {fields.replace('FOLDER', str(tmp_path))}}}]")
    assert words in str(error), str(error)
