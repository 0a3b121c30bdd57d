"""Every family learns: from one half-trained model, a short run gains on held-out sums what shuffled rewards do not."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from nemo_rl_like.observe.metrics import read_series
from nemo_rl_like.spec.experiment import ModelSpec
from nemo_rl_like.spec.loader import load_spec, resolved_yaml
from tests.stages.killing import finish

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
STEPS = 40
GAIN = 0.10
"""What each family must gain in held-out greedy accuracy (1: all right)."""
CONTROL = 0.03
"""What the same run with shuffled rewards may gain at most."""
SMALL = ("environment.config.validation=16", "environment.config.test=256")
SHORT = ("stages.sft.steps=400", "stages.sft.validate_every_steps=0", "stages.sft.optimizer.decay_steps=380")
FAMILIES: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dapo": (),
    "gspo": ("updates_per_batch=2",),
    "rloo": (),
    "reinforce_pp": ("updates_per_batch=2",),
    "remax": (),
    "ppo": ("updates_per_batch=2", "critic.optimizer.lr=1e-3", "critic.warmup_steps=3"),
}
"""Presets with what they need beside their lines at this size."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the model that every family starts from: the demo's SFT, cut short; the same after the demo's GRPO: a teacher)."""
    folder = tmp_path_factory.mktemp("models")
    run = ["run", str(DEMO), f"output={folder / 'run'}", "stages.grpo.steps=60", *SMALL, *SHORT, "--plain"]
    assert finish(run, folder / "log", timeout_s=800) == 0
    for stage in ("sft", "grpo"):
        (last,) = (folder / "run" / stage / "checkpoints").glob("step_*")
        assert finish(["export", str(last), str(folder / stage)], folder / "log", timeout_s=120) == 0
    return folder / "sft", folder / "grpo"


def gain(start: Path, folder: Path, *overrides: str) -> float:
    """What a run from `start` with overrides of the demo's GRPO stage gains in held-out greedy accuracy."""
    evaluated = (f"evaluate_every_steps={STEPS}", "evaluation={split: test, max_new_tokens: 5}", f"steps={STEPS}")
    spec = load_spec(DEMO, [*SMALL, *(f"stages.grpo.{text}" for text in (*evaluated, *overrides))])
    update = {"stages": spec.stages[1:2], "model": ModelSpec(path=str(start)), "output": str(folder / "run")}
    (folder / "spec.yaml").write_text(resolved_yaml(spec.model_copy(update=update)))
    assert finish(["run", str(folder / "spec.yaml"), "--plain"], folder / "log", timeout_s=600) == 0
    found = dict(read_series(folder / "run" / "grpo" / "metrics.jsonl", "eval/accuracy"))
    return found[STEPS] - found[0]


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gains_on_held_out_sums(name: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    assert gain(models[0], tmp_path, f"algorithm.preset={name}", *FAMILIES[name]) >= GAIN


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_a_student_gains_from_its_teacher_alone(models: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = models
    assert gain(student, tmp_path, "algorithm.preset=opd", f"teacher={teacher}") >= GAIN


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_shuffled_rewards_gain_nothing(models: tuple[Path, Path], tmp_path: Path) -> None:
    assert gain(models[0], tmp_path, "algorithm.preset=grpo", "algorithm.shuffle_rewards=true") <= CONTROL


def chosen_gain(start: Path, folder: Path, choose: str) -> float:
    """What SFT on one kept answer of eight to each training task gains in held-out greedy accuracy."""
    spec = load_spec(DEMO, SMALL).model_dump(mode="json")
    evaluation = {"kind": "evaluate", "evaluation": {"split": "test", "max_new_tokens": 5}}
    sampling = {"temperature": 1.0, "max_new_tokens": 5}
    spec["stages"] = [
        {**evaluation, "name": "before"},
        {"kind": "sample", "tasks": 1024, "choose": choose, "sampling": sampling, "prompts_per_batch": 256},
        {"kind": "sft", "steps": 120, "optimizer": {"lr": 2e-4, "betas": [0.9, 0.98]}},
        {**evaluation, "name": "after"},
    ]
    update = {"model": {"path": str(start)}, "output": str(folder / "run")}
    (folder / "spec.yaml").write_text(json.dumps({**spec, **update}))
    assert finish(["run", str(folder / "spec.yaml"), "--plain"], folder / "log", timeout_s=600) == 0
    found = []
    for name in ("before", "after"):
        results = json.loads((folder / "run" / name / "report" / "report.json").read_text())["results"]
        (result,) = results.values()
        found.append(result["metrics"]["eval/accuracy"])
    return float(found[1] - found[0])


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(1500)
def test_the_best_of_n_teaches_what_random_answers_do_not(models: tuple[Path, Path], tmp_path: Path) -> None:
    gains = {}
    for choose in ("best", "random"):
        (tmp_path / choose).mkdir()
        gains[choose] = chosen_gain(models[0], tmp_path / choose, choose)
    assert gains["best"] >= GAIN, gains
    assert gains["random"] <= gains["best"] / 2, gains


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_pretraining_predicts_held_out_text_better_than_character_counts(tmp_path: Path) -> None:
    config = DEMO.parent / "algorithms" / "pretrain.yaml"
    text = DEMO.parent / "algorithms" / "sums.txt"
    overrides = [f"output={tmp_path / 'run'}", f"stages.pretrain.data.paths=[{text}]"]
    assert finish(["run", str(config), *overrides, "--plain"], tmp_path / "log", timeout_s=600) == 0
    held = dict(read_series(tmp_path / "run" / "pretrain" / "metrics.jsonl", "validation/loss"))
    counts = Counter(character for document in text.read_text().split("\n\n") for character in f"{document.strip()}$")
    total = sum(counts.values())
    entropy = -sum(count / total * math.log(count / total) for count in counts.values())
    assert held[0] > entropy > held[max(held)], (held, entropy)
