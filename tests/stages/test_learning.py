"""Every family learns: from one half-trained model, a short run gains on held-out sums what shuffled rewards do not."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.data.messages import assistant, user
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.observe.metrics import read_series
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec, resolved_yaml
from nemo_rl_like.spec.model import ModelSpec
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
    "online_dpo": (),
    "xpo": (),
    "nash_md": ("algorithm.shaping.0.compare=sign", "algorithm.kl.coef=0.01"),
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


def gain(start: Path, folder: Path, *overrides: str, top: tuple[str, ...] = ()) -> float:
    """What a run from `start` with overrides of the demo's GRPO stage, and of its spec, gains in held-out greedy accuracy."""
    evaluated = (f"evaluate_every_steps={STEPS}", "evaluation={split: test, max_new_tokens: 5}", f"steps={STEPS}")
    spec = load_spec(DEMO, [*SMALL, *top, *(f"stages.grpo.{text}" for text in (*evaluated, *overrides))])
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
def test_adapters_alone_gain_on_held_out_sums(models: tuple[Path, Path], tmp_path: Path) -> None:
    lora = "policy.lora={rank: 32, alpha: 64.0}"
    assert gain(models[0], tmp_path, "algorithm.preset=grpo", "optimizer.lr=1e-3", top=(lora,)) >= GAIN


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_a_student_gains_from_its_teacher_alone(models: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = models
    assert gain(student, tmp_path, "algorithm.preset=opd", f"teacher={teacher}") >= GAIN


def accuracy(folder: Path, stage: str) -> float:
    """Held-out greedy accuracy that an `evaluate` stage found."""
    (result,) = json.loads((folder / "run" / stage / "report" / "report.json").read_text())["results"].values()
    return float(result["metrics"]["eval/accuracy"])


def taught(start: Path, folder: Path, training: dict[str, Any]) -> float:
    """What a stage on the environment's own, often wrong, answers gains from `start` in held-out greedy accuracy."""
    spec = load_spec(DEMO, SMALL)
    assert spec.environment is not None
    source = resolve(spec.environment)
    talks = [(f"{task.id}=", source.demonstration(task)) for task in source.tasks("train")[:2000]]
    rows = [{"messages": [asdict(user(asked)), asdict(assistant(answer))]} for asked, answer in talks]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, evaluation = {"path": str(folder / "rows.jsonl")}, {"split": "test", "max_new_tokens": 5}
    stages = [
        {"kind": "evaluate", "name": "before", "evaluation": evaluation},
        {"data": data, "steps": 60, "examples_per_step": 64, "optimizer": {"kind": "adamw", "lr": 3e-4}, **training},
        {"kind": "evaluate", "name": "after", "evaluation": evaluation},
    ]
    raw = spec.model_dump(mode="json") | {"stages": stages, "output": str(folder / "run")}
    made = ExperimentSpec.model_validate(raw | {"model": {"path": str(start)}})
    (folder / "spec.yaml").write_text(resolved_yaml(made))
    assert finish(["run", str(folder / "spec.yaml"), "--plain"], folder / "log", timeout_s=600) == 0
    return accuracy(folder, "after") - accuracy(folder, "before")


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["the data's responses", "its own responses"])
def test_a_student_learns_what_its_teacher_says(fraction: float, models: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = models
    sampling = {"max_new_tokens": 5}
    stage = {"kind": "distill", "teachers": [{"path": str(teacher)}], "top_k": 8, "sampling": sampling}
    assert taught(student, tmp_path, {**stage, "on_policy_fraction": fraction}) >= GAIN


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_the_same_responses_without_a_teacher_gain_nothing(models: tuple[Path, Path], tmp_path: Path) -> None:
    assert taught(models[0], tmp_path, {"kind": "sft"}) <= CONTROL


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


PAIRS = Path(__file__).parents[2] / "configs" / "algorithms" / "sums.jsonl"


@pytest.fixture(scope="module")
def judge(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A reward model of right and wrong sums, as a folder, and its held-out accuracies during training."""
    folder = tmp_path_factory.mktemp("judge")
    data = f"{{path: {PAIRS}, validation_fraction: 0.125}}"
    often = "examples_per_step: 64, validate_every_steps: 40, optimizer: {lr: 3.0e-4}"
    stage = f"{{kind: reward_model, data: {data}, steps: 120, {often}}}"
    spec = load_spec(DEMO, [f"stages=[{stage}]"])
    spec = spec.model_copy(update={"model": ModelSpec(path=str(models[0])), "output": str(folder / "run")})
    (folder / "spec.yaml").write_text(resolved_yaml(spec))
    assert finish(["run", str(folder / "spec.yaml"), "--plain"], folder / "log", timeout_s=600) == 0
    found = read_series(folder / "run" / "reward_model" / "metrics.jsonl", "validation/accuracy")
    (last,) = (folder / "run" / "reward_model" / "checkpoints").glob("step_*")
    return last / "weights", [accuracy for _, accuracy in found]


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_a_reward_model_tells_right_sums_from_wrong_ones_that_it_never_saw(judge: tuple[Path, list[float]]) -> None:
    _, accuracies = judge
    assert accuracies[0] < 0.7 and accuracies[-1] > 0.85, accuracies


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_a_policy_gains_what_a_reward_model_pays_and_outwits_it(
    models: tuple[Path, Path], judge: tuple[Path, list[float]], tmp_path: Path
) -> None:
    judged = f"reward_model={{paths: [{judge[0]}], environment_weight: 0.0}}"
    truth = gain(models[0], tmp_path, "algorithm.preset=grpo", judged)
    paid = [reward for _, reward in read_series(tmp_path / "run" / "grpo" / "metrics.jsonl", "reward")]
    assert sum(paid[-5:]) / 5 > sum(paid[:5]) / 5 + 2.0, paid
    assert truth < 0, "pairs that differ by a carry alone teach no addition: the score rises and the truth falls"


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
