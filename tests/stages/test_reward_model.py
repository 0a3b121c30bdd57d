"""From pairs to a reward model to a policy that it judges: one pipeline on Ray, killed and resumed; and what is refused early."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from nemo_rl_like.checkpoint.layout import verify
from nemo_rl_like.observe.metrics import read_series
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.loader import load_spec
from tests.stages.killing import finish
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)

ROOT = Path(__file__).parents[2]
SPEC = """
name: judged
seed: 3
output: {output}
model:
  init: {{hidden_size: 64, intermediate_size: 96, layers: 2, heads: 2, kv_heads: 2, head_dim: 32, max_positions: 32}}
  tokenizer: {{characters: "0123456789+="}}
policy: {{threads_per_rank: 1}}
environment: {{prompts: {folder}/prompts.jsonl}}
stages:
  - kind: reward_model
    name: first
    data: {{path: {folder}/pairs.jsonl, validation_fraction: 0.2}}
    loss: {{kind: pairwise, center: 0.01}}
    steps: 100
    examples_per_step: 32
    validate_every_steps: 25
    optimizer: {{lr: 1.0e-3}}
  - kind: reward_model
    name: second
    data: {{path: {folder}/pairs.jsonl}}
    seed: 7
    steps: 40
    optimizer: {{lr: 1.0e-3}}
  - kind: rl
    steps: 20
    prompts_per_step: 8
    samples_per_prompt: 8
    sampling: {{max_new_tokens: 4}}
    reward_model: {{stages: [first, second], combine: min}}
    optimizer: {{lr: 3.0e-3}}
    checkpoint: {{every_steps: 5}}
  - kind: export
    checkpoint: first
"""


def written(folder: Path, output: Path) -> Path:
    """Pairs whose chosen answer repeats the first digit, the prompts alone, and a spec that trains on both."""
    draw = random.Random(1)
    rows = []
    for a in range(10):
        for b in range(20):
            other = (a + draw.randint(1, 9)) % 10
            rows.append({"prompt": f"{a}+{b}=", "chosen": f"{a}{a}", "rejected": f"{other}{other}"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    path = folder / f"{output.name}.yaml"
    path.write_text(SPEC.format(output=output, folder=folder))
    return path


def lines(output: Path, stage: str) -> list[dict[str, float]]:
    """Metric lines without timings."""
    text = (output / stage / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("timing/")} for line in text.splitlines()]


def weights(output: Path, stage: str, step: int) -> dict[str, str]:
    manifest = verify(output / stage / "checkpoints" / f"step_{step}")
    return {f.path: f.sha256 for f in manifest.files if f.path.endswith(".safetensors")}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_reward_models_learn_and_judge_a_policy_that_gains_and_survives_kills(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finish(["run", str(written(tmp_path, whole))], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    accuracies = [value for _, value in read_series(whole / "first" / "metrics.jsonl", "validation/accuracy")]
    assert accuracies[0] < 0.8 and max(accuracies) > 0.9, accuracies
    rewards = [value for _, value in read_series(whole / "rl" / "metrics.jsonl", "reward")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5, rewards
    assert all(
        line["rewards/reward_model/mean"] == pytest.approx(line["reward"])
        for line in lines(whole, "rl")
        if line["step"]
    )
    told = [json.loads(line) for line in (whole / "rl" / "rollouts.jsonl").read_text().splitlines()]
    assert all(line["reward"] == line["rewards"]["reward_model"] for line in told)
    assert AutoModelForSequenceClassification.from_pretrained(whole / "export" / "model").config.num_labels == 1
    spec = written(tmp_path, cut)
    assert finish(["run", str(spec)], tmp_path / "log", fault="episode.mid:12") != 0
    assert finish(["run", str(spec), "--resume"], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    for stage, step in (("first", 100), ("second", 40), ("rl", 20)):
        assert weights(cut, stage, step) == weights(whole, stage, step)
        assert lines(cut, stage) == lines(whole, stage)
    assert weights(whole, "first", 100) != weights(whole, "second", 40)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("{kind: reward_model, data: {path: none.jsonl}}", ("none.jsonl", "no such file")),
        (
            "{kind: reward_model, data: {path: FOLDER/pairs.jsonl}, loss: regression}",
            ("pairs.jsonl:1", "`completion`", "loss: pairwise"),
        ),
        (
            "{kind: reward_model, data: {path: FOLDER/pairs.jsonl}, loss: {kind: pairwise, margin_weight: 1.0}}",
            ("pairs.jsonl:1", "has no `margin`", "remove `margin_weight`"),
        ),
        (
            "{kind: reward_model, data: {path: FOLDER/pairs.jsonl}, validate_every_steps: 5}",
            ("validate_every_steps", "`data.validation_fraction` is 0.0", "0.1"),
        ),
        (
            "{kind: rl, reward_model: {}}",
            ("`reward_model` needs `paths` or `stages`",),
        ),
        (
            "{kind: rl, reward_model: {paths: [x, x]}}",
            ("'x' more than once",),
        ),
        (
            "{kind: rl, reward_model: {paths: [x], combine: mean_minus_variance}}",
            ("one model has no variance", "combine: mean"),
        ),
        ("{kind: rl, reward_model: {paths: [nowhere]}}", ("`reward_model.paths`", "'nowhere'", "not a folder")),
        ("{kind: rl, reward_model: {stages: [other]}}", ("reward_model.stages", "no stage 'other'", "makes a reward model")),
        ("{kind: preference, data: {path: FOLDER/pairs.jsonl}}, {kind: rl, reward_model: {stages: [preference]}}",
         ("'preference' makes no reward model",)),
        ("{kind: reward_model, data: {path: FOLDER/pairs.jsonl}}, {kind: sft, data: {path: FOLDER/pairs.jsonl}, init_from: reward_model}",
         ("init_from", "'reward_model' makes no checkpoint")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, stage: str, words: tuple[str, ...]
) -> None:
    written(tmp_path, tmp_path / "unused")
    error = refusal(tmp_path, f"stages=[{stage.replace('FOLDER', str(tmp_path))}]")
    for word in words:
        assert word in str(error), str(error)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("{kind: rl}", ("needs a `reward_model`", "`prompts` alone")),
        ("{kind: evaluate}", ("evaluates an environment with a reward of its own", "`reward_url`")),
    ],
)
def test_prompts_alone_need_a_judge(tmp_path: Path, stage: str, words: tuple[str, ...]) -> None:
    written(tmp_path, tmp_path / "unused")
    error = refusal(tmp_path, f"environment={{prompts: {tmp_path}/prompts.jsonl}}", f"stages=[{stage}]")
    for word in words:
        assert word in str(error), str(error)


def test_a_good_spec_reaches_the_start_of_ray(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Ray was started"):
        run_pipeline(load_spec(written(tmp_path, tmp_path / "out")))
