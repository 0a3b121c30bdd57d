"""The sample stage on Ray: a dataset that SFT trains on, the same however often the run was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.hashing import hash_path
from tests.stages.killing import finish, write_sums, write_tiny
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)

SPEC = """
name: sampled
environment: {reward: FOLDER/reward.py:reward_func, prompts: FOLDER/prompts.jsonl}
stages:
  - {kind: sample, tasks: 12, samples_per_prompt: 6, keep: 2, sampling: {max_new_tokens: 6}, keep_truncated: true, prompts_per_batch: 4}
  - {kind: sft, data: {validation_fraction: 0.2}, steps: 3, examples_per_step: 8, validate_every_steps: 3}
"""


def written(output: Path) -> Path:
    """A spec that samples answers and trains on those with many ones."""
    write_sums(output.parent)
    return write_tiny(output, SPEC)


@pytest.mark.service
@pytest.mark.timeout(900)
def test_killed_and_resumed_gives_the_same_dataset_and_sft_trains_on_it(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    assert finish(["run", str(written(cut))], log, 600, fault="episode.mid:2") != 0
    assert len(list((cut / "sample" / "parts").glob("*.json"))) == 1
    assert finish(["run", str(tmp_path / "cut.yaml"), "--resume"], log, 600) == 0, log.read_text()
    assert finish(["run", str(written(whole)), "stages.sft.steps=1"], log, 600) == 0, log.read_text()
    datasets = [run / "sample" / "dataset.jsonl" for run in (whole, cut)]
    assert hash_path(datasets[0]) == hash_path(datasets[1])
    report = json.loads((cut / "sample" / "report.json").read_text())
    rows = [json.loads(line) for line in datasets[1].read_text().splitlines()]
    assert (report["prompts"], report["samples"], report["kept"]) == (12, 72, len(rows))
    assert report["reward_after"] > report["reward_before"]
    assert report["reward_after"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
    assert not (cut / "sample" / "parts").exists()
    last = json.loads((cut / "sft" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3 and last["validation/loss"] > 0


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            "stages=[{kind: sample, samples_per_prompt: 4, keep: 5}]",
            "`keep` is 5, more than the 4 of `samples_per_prompt`",
        ),
        ("stages=[{kind: sft, data: {from_stage: rl}}]", "there is no stage 'rl'"),
        ("stages=[{kind: sft, data: {from_stage: rl, path: x.jsonl}}]", "at most one of `path`"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path, stages: str, words: str) -> None:
    assert words in str(refusal(tmp_path, stages))


def test_random_vllm_weights_cannot_sample(tmp_path: Path) -> None:
    error = refusal(tmp_path, "stages=[{kind: sample}]", "engine.kind=vllm")
    assert "stage sample starts from the random weights of `model.init`" in str(error)
