"""Models on ranks of their own: the same run as on shared ranks, bit for bit; and what cannot be placed is refused early."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.spec.rl import RlStageSpec
from tests.stages.killing import finish, metric_lines, tensor_files
from tests.stages.test_bad_input import no_ray, refusal  # noqa: F401  (the fixture counts for all tests here)

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
TINY = (
    "stages.sft.steps=4",
    "stages.sft.validate_every_steps=0",
    "stages.sft.optimizer.decay_steps=4",
    "stages.sft.optimizer.warmup_steps=1",
    "environment.config.validation=16",
    "environment.config.test=16",
    "model.init.layers=2",
    "model.init.hidden_size=64",
    "policy.threads_per_rank=1",
    "cluster.devices=3",
    "stages.grpo.steps=3",
    "stages.grpo.algorithm={preset: ppo, kl: {coef: 0.01, estimator: k1, place: reward}}",
)


def results(output: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """Tensors of the last checkpoint, and metrics."""
    return tensor_files(output / "grpo" / "checkpoints" / "step_3"), metric_lines(output / "grpo")


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_a_critic_and_a_reference_on_their_own_ranks_change_nothing(tmp_path: Path) -> None:
    for name, more in (("shared", ()), ("own", ("stages.grpo.own_ranks=[critic, reference]",))):
        run = ["run", str(DEMO), f"output={tmp_path / name}", *TINY, *more, "--plain"]
        assert finish(run, tmp_path / "log", timeout_s=400) == 0, (tmp_path / "log").read_text()
    assert results(tmp_path / "own") == results(tmp_path / "shared")
    assert any(path.startswith("critic-weights/") for path in results(tmp_path / "own")[0])


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"own_ranks": ["teacher"]}, ("`own_ranks` has teacher", "has none")),
        ({"own_ranks": ["critic"]}, ("`own_ranks` has critic", "has none")),
        (
            {
                "own_ranks": ["reference"],
                "algorithm": {"opponent": {"kind": "reference"}, "pairs": {}},
            },
            ("decoded on policy and reference together",),
        ),
    ],
)
def test_ranks_of_what_is_not_there_are_refused(stage: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as error:
        RlStageSpec.model_validate(stage)
    assert all(word in str(error.value) for word in words), error.value


def test_more_ranks_than_devices_are_refused_before_anything_starts(tmp_path: Path) -> None:
    more = ("cluster.devices=2", "stages.rl.own_ranks=[critic, reference]", "stages.rl.algorithm.kl.coef=0.1")
    error = refusal(tmp_path, "stages.rl.algorithm.advantage={kind: gae}", *more)
    assert "own_ranks" in str(error) and "3 ranks" in str(error) and "2 cpu" in str(error), str(error)


def test_the_spec_counts_an_ensemble(tmp_path: Path) -> None:
    stage = load_spec(
        DEMO, ["stages.grpo.reward_model={paths: [a, b]}", "stages.grpo.own_ranks=[reward_model]"]
    ).stages[1]
    assert isinstance(stage, RlStageSpec) and stage.models_beside["reward_model"] == 2
