"""The preference stage from a file to a checkpoint: it learns, and killed and resumed it is never killed, moving reference included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from tests.stages.killing import finish, first_digit_pairs, metric_lines, tensor_files, write_rows, write_tiny
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)

ROOT = Path(__file__).parents[2]
SPEC = """
name: preference
stages:
  - kind: preference
    data: {path: FOLDER/pairs.jsonl, validation_fraction: 0.2}
    losses: [{kind: dpo, beta: 0.5}]
    steps: 60
    pairs_per_step: 32
    validate_every_steps: 20
    reference_sync: {every_steps: 25, alpha: 0.5}
    optimizer: {lr: 3.0e-3}
    checkpoint: {every_steps: 10}
"""


def written(output: Path) -> Path:
    """A spec, and the pairs that it trains on."""
    write_rows(output.parent / "pairs.jsonl", first_digit_pairs())
    return write_tiny(output, SPEC)


def results(output: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """Weights, optimizer and reference of the last checkpoint, and metrics."""
    stage = output / "preference"
    return tensor_files(stage / "checkpoints" / "step_60"), metric_lines(stage)


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_dpo_raises_held_out_accuracy_and_survives_kills(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finish(["run", str(written(whole))], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    weights, lines = results(whole)
    accuracies = [line["validation/rewards/accuracies"] for line in lines if "validation/loss" in line]
    assert max(accuracies) > 0.9, accuracies
    assert any(path.startswith("reference-weights/") for path in weights)
    spec = written(cut)
    assert finish(["run", str(spec)], tmp_path / "log", fault="optimizer.mid:34") != 0
    assert finish(["run", str(spec), "--resume"], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert results(cut) == (weights, lines)


def test_the_config_for_dpo_trains_on_sums_that_are_not_held_out() -> None:
    spec = load_spec(ROOT / "configs" / "algorithms" / "dpo.yaml")
    (stage,) = [s for s in spec.stages if isinstance(s, PreferenceStageSpec)]
    assert spec.environment is not None
    source = resolve(spec.environment)
    held = {f"{task.id}=" for split in ("validation", "test") for task in source.tasks(split)}
    rows = [json.loads(line) for line in (ROOT / stage.data.path).read_text().splitlines()]
    assert len(rows) >= 500 and not {row["prompt"] for row in rows} & held
    for row in rows:
        left, right = row["prompt"].rstrip("=").split("+")
        assert row["chosen"] == str(int(left) + int(right)) != row["rejected"]


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("{data: {path: none.jsonl}}", ("none.jsonl", "no such file")),
        ("{data: {path: FOLDER/pairs.jsonl}, losses: [kto]}", ("pairs.jsonl:1", "`completion`", "data.unpair: true")),
        (
            "{data: {path: FOLDER/pairs.jsonl}, losses: [{kind: dpo, offset: 1.0}]}",
            ("pairs.jsonl:1", "has no `margin`", "remove `offset`"),
        ),
    ],
)
def test_data_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, stage: str, words: tuple[str, ...]
) -> None:
    written(tmp_path / "unused")
    stages = f"stages=[{{kind: preference, {stage.replace('FOLDER', str(tmp_path))[1:]}]"
    error = refusal(tmp_path, stages)
    for word in words:
        assert word in str(error), str(error)


def test_a_reference_that_moves_does_not_lie_in_host_memory(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"`reference_sync`.*`policy.offload.frozen`"):
        load_spec(written(tmp_path / "out"), ("policy.offload={frozen: true}",))


def test_a_good_spec_reaches_the_start_of_ray(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path / "out"))
    with pytest.raises(AssertionError, match="Ray was started"):
        run_pipeline(spec)
