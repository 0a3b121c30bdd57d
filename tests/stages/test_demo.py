"""The demo: held-out pairs are unseen, and GRPO beats the SFT that it started from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.spec.loader import load_spec
from tests.stages.killing import finish

ROOT = Path(__file__).parents[2]


def test_no_held_out_pair_is_seen_in_training_in_either_order() -> None:
    spec = load_spec(ROOT / "configs" / "demo.yaml")
    assert spec.environment is not None
    source = resolve(spec.environment)
    pairs = {
        split: {tuple(sorted(int(x) for x in task.id.split("+"))) for task in source.tasks(split)}
        for split in ("train", "validation", "test")
    }
    assert not pairs["train"] & pairs["test"]
    assert not pairs["train"] & pairs["validation"]
    assert not pairs["validation"] & pairs["test"]
    assert min(len(p) for p in pairs.values()) > 200


def test_the_demo_and_its_controls_train_alike() -> None:
    demo, controls = load_spec(ROOT / "configs" / "demo.yaml"), load_spec(ROOT / "configs" / "demo_controls.yaml")
    assert controls.stages[:2] == demo.stages[:2]
    assert (controls.model, controls.environment, controls.policy) == (demo.model, demo.environment, demo.policy)
    shuffled = controls.stages[2]
    assert shuffled.model_dump(exclude={"name", "init_from", "algorithm"}) == demo.stages[1].model_dump(
        exclude={"name", "init_from", "algorithm"}
    )


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_grpo_gains_15_points_on_held_out_sums_and_the_export_agrees(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    assert finish(["demo", "--seed", "11", "--output", str(output)], tmp_path / "log", timeout_s=800) == 0
    report = json.loads((output / "report.json").read_text())
    accuracy = report["heldout_accuracy"]
    assert accuracy["grpo"] - accuracy["sft"] >= 0.15
    assert report["seed"] == 11
    assert report["reward_last"] > report["reward_first"]
    script = ROOT / "benchmarks" / "recompute_accuracy.py"
    assert subprocess.run([sys.executable, str(script), str(output)], timeout=300).returncode == 0
