"""From pairs to a reward model to a policy that it judges: one pipeline on Ray, killed and resumed; and what is refused early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from nemo_rl_like.observe.metrics import read_series
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.loader import load_spec
from tests.stages.killing import finish, first_digit_pairs, metric_lines, tensor_files, write_rows, write_tiny
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)

SPEC = """
name: judged
environment: {prompts: FOLDER/prompts.jsonl}
stages:
  - kind: reward_model
    name: first
    data: {path: FOLDER/pairs.jsonl, validation_fraction: 0.2}
    loss: {kind: pairwise, center: 0.01}
    steps: 100
    examples_per_step: 32
    validate_every_steps: 25
    optimizer: {lr: 1.0e-3}
  - kind: reward_model
    name: second
    data: {path: FOLDER/pairs.jsonl}
    seed: 7
    steps: 40
    optimizer: {lr: 1.0e-3}
  - kind: rl
    steps: 20
    prompts_per_step: 8
    samples_per_prompt: 8
    sampling: {max_new_tokens: 4}
    reward_model: {stages: [first, second], combine: min}
    optimizer: {lr: 3.0e-3}
    checkpoint: {every_steps: 5}
  - kind: export
    checkpoint: first
"""


def written(output: Path) -> Path:
    """A spec, the pairs that it trains on, and their prompts alone."""
    pairs = first_digit_pairs()
    write_rows(output.parent / "pairs.jsonl", pairs)
    asked = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in pairs]
    write_rows(output.parent / "prompts.jsonl", asked)
    return write_tiny(output, SPEC)


def results(output: Path, stage: str, step: int) -> tuple[dict[str, str], list[dict[str, float]]]:
    """Tensors of a stage's last checkpoint, and its metrics."""
    return tensor_files(output / stage / "checkpoints" / f"step_{step}"), metric_lines(output / stage)


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_reward_models_learn_and_judge_a_policy_that_gains_and_survives_kills(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finish(["run", str(written(whole))], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    accuracies = [value for _, value in read_series(whole / "first" / "metrics.jsonl", "validation/accuracy")]
    assert accuracies[0] < 0.8 and max(accuracies) > 0.9, accuracies
    rewards = [value for _, value in read_series(whole / "rl" / "metrics.jsonl", "reward")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5, rewards
    assert all(
        line["rewards/reward_model/mean"] == pytest.approx(line["reward"])
        for line in metric_lines(whole / "rl")
        if line["step"]
    )
    told = [json.loads(line) for line in (whole / "rl" / "rollouts.jsonl").read_text().splitlines()]
    assert all(line["reward"] == line["rewards"]["reward_model"] for line in told)
    assert AutoModelForSequenceClassification.from_pretrained(whole / "export" / "model").config.num_labels == 1
    spec = written(cut)
    assert finish(["run", str(spec)], tmp_path / "log", fault="episode.mid:12") != 0
    assert finish(["run", str(spec), "--resume"], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    for stage, step in (("first", 100), ("second", 40), ("rl", 20)):
        assert results(cut, stage, step) == results(whole, stage, step)
    assert results(whole, "first", 100)[0] != results(whole, "second", 40)[0]


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
        ("{kind: rl, algorithm: {advantage: gdpo}, reward_model: {paths: [x], weight: 0.5}}",
         ("`reward_model.weight` is 0.5", "`advantage.weights`")),
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
    written(tmp_path / "unused")
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
    written(tmp_path / "unused")
    error = refusal(tmp_path, f"environment={{prompts: {tmp_path}/prompts.jsonl}}", f"stages=[{stage}]")
    for word in words:
        assert word in str(error), str(error)


def test_a_good_spec_reaches_the_start_of_ray(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Ray was started"):
        run_pipeline(load_spec(written(tmp_path / "out")))
