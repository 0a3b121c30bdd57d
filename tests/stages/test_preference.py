"""The preference stage from a file to a checkpoint: it learns, and killed and resumed it is never killed, moving reference included."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from nemo_rl_like.checkpoint.layout import verify
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from tests.stages.killing import finish
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)

ROOT = Path(__file__).parents[2]
SPEC = """
name: preference
seed: 3
output: {output}
model:
  init: {{hidden_size: 64, intermediate_size: 96, layers: 2, heads: 2, kv_heads: 2, head_dim: 32, max_positions: 32}}
  tokenizer: {{characters: "0123456789+="}}
policy: {{threads_per_rank: 1}}
stages:
  - kind: preference
    data: {{path: {folder}/pairs.jsonl, validation_fraction: 0.2}}
    losses: [{{kind: dpo, beta: 0.5}}]
    steps: 60
    pairs_per_step: 32
    validate_every_steps: 20
    reference_sync: {{every_steps: 25, alpha: 0.5}}
    optimizer: {{lr: 3.0e-3}}
    checkpoint: {{every_steps: 10}}
"""


def written(folder: Path, output: Path) -> Path:
    """Pairs whose chosen answer repeats the first digit, and a spec that trains on them."""
    draw = random.Random(1)
    rows = []
    for a in range(10):
        for b in range(20):
            other = (a + draw.randint(1, 9)) % 10
            rows.append({"prompt": f"{a}+{b}=", "chosen": f"{a}{a}", "rejected": f"{other}{other}"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{output.name}.yaml"
    path.write_text(SPEC.format(output=output, folder=folder))
    return path


def lines(output: Path) -> list[dict[str, float]]:
    """Metric lines without timings."""
    text = (output / "preference" / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("timing/")} for line in text.splitlines()]


def weights(output: Path) -> dict[str, str]:
    """sha256 by file of the last checkpoint: weights, optimizer and reference."""
    manifest = verify(output / "preference" / "checkpoints" / "step_60")
    return {f.path: f.sha256 for f in manifest.files if f.path.endswith(".safetensors")}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_dpo_raises_held_out_accuracy_and_survives_kills(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finish(["run", str(written(tmp_path, whole))], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    accuracies = [line["validation/rewards/accuracies"] for line in lines(whole) if "validation/loss" in line]
    assert max(accuracies) > 0.9, accuracies
    assert any(path.startswith("reference-weights/") for path in weights(whole))
    spec = written(tmp_path, cut)
    assert finish(["run", str(spec)], tmp_path / "log", fault="optimizer.mid:34") != 0
    assert finish(["run", str(spec), "--resume"], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert weights(cut) == weights(whole)
    assert lines(cut) == lines(whole)


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
    written(tmp_path, tmp_path / "unused")
    stages = f"stages=[{{kind: preference, {stage.replace('FOLDER', str(tmp_path))[1:]}]"
    error = refusal(tmp_path, stages)
    for word in words:
        assert word in str(error), str(error)


def test_a_good_spec_reaches_the_start_of_ray(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path, tmp_path / "out"))
    with pytest.raises(AssertionError, match="Ray was started"):
        run_pipeline(spec)
