"""Named algorithms: every preset is a valid block, and a user's own lines win over it, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec, resolved_yaml
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.presets import presets
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.source import plain

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(presets())
RL_NAMES = sorted(presets("rl"))
OTHERS = sorted(set(NAMES) - set(RL_NAMES))


def rl_stage(spec: ExperimentSpec) -> RlStageSpec:
    """The spec's reinforcement stage."""
    (stage,) = (s for s in spec.stages if isinstance(s, RlStageSpec))
    return stage


def demo(*overrides: str) -> ExperimentSpec:
    """The demo with overrides of its GRPO stage."""
    return load_spec(CONFIGS / "demo.yaml", [f"stages.grpo.{text}" for text in overrides])


@pytest.mark.parametrize("name", RL_NAMES)
def test_every_rl_preset_is_what_its_config_runs(name: str) -> None:
    stage = rl_stage(load_spec(CONFIGS / "algorithms" / f"{name}.yaml"))
    assert stage.algorithm.preset == name
    teacher = ["teacher=runs/x"] if name == "opd" else []
    assert stage.algorithm == rl_stage(demo(f"algorithm.preset={name}", *teacher)).algorithm


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_preset_is_in_a_stage_of_its_config_that_it_changes(name: str) -> None:
    (stage,) = (
        s for s in load_spec(CONFIGS / "algorithms" / f"{name}.yaml").stages if getattr(s, "preset", None) == name
    )
    assert stage.kind == presets()[name].stage
    given = plain(presets()[name].block)
    assert isinstance(given, dict) and set(given) <= stage.model_fields_set


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_a_config_under_40_lines(name: str) -> None:
    assert len((CONFIGS / "algorithms" / f"{name}.yaml").read_text().splitlines()) < 40


@pytest.mark.parametrize("stage", sorted({preset.stage for preset in presets().values()} - {"rl"}))
def test_a_stage_refuses_the_name_of_another(tmp_path: Path, stage: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"extends: {CONFIGS / 'demo.yaml'}\nstages:\n  - kind: {stage}\n    preset: grpo\n")
    with pytest.raises(SpecError, match=f"spec.yaml:4.*no preset 'grpo' for stages of kind {stage}, only for rl"):
        load_spec(file)


def test_a_stages_own_lines_win_over_its_presets(tmp_path: Path) -> None:
    losses = {"losses.0.beta=0.5": [("dpo", 0.5)], "losses=[ipo]": [("ipo", 0.1)]}
    for override, wanted in losses.items():
        spec = load_spec(CONFIGS / "algorithms" / "rpo.yaml", [f"stages.preference.{override}"])
        (stage,) = (s for s in spec.stages if isinstance(s, PreferenceStageSpec))
        assert [(loss.kind, loss.beta) for loss in stage.losses] == wanted and stage.rpo_alpha == 1.0


def test_a_critic_without_an_advantage_that_reads_it_is_refused() -> None:
    with pytest.raises(SpecError, match="reads no values; remove it, or use gae or vapo"):
        demo("critic.value_clip=0.1")
    assert rl_stage(demo("algorithm.preset=ppo")).critic_or_default.optimizer.lr == 1e-5
    with pytest.raises(SpecError, match="warmup_steps` is 120, must be below"):
        demo("algorithm.preset=ppo", "critic.warmup_steps=120")


def test_own_lines_win_over_the_presets_key_by_key() -> None:
    stage = rl_stage(demo("algorithm.preset=dapo", "algorithm.policy_loss.low=0.1", "algorithm.shaping=[]"))
    assert stage.algorithm.policy_loss.model_dump() == {
        "kind": "clip",
        "low": 0.1,
        "high": 0.28,
        "dual": None,
        "delta": None,
    }
    assert stage.algorithm.shaping == () and stage.algorithm.dynamic_sampling is not None


def test_another_kind_takes_nothing_from_the_presets_block() -> None:
    stage = rl_stage(demo("algorithm.preset=dapo", "algorithm.policy_loss={kind: sapo}"))
    assert stage.algorithm.policy_loss.model_dump() == {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}


def test_an_unknown_preset_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no preset 'dappo'; did you mean `dapo`"):
        demo("algorithm.preset=dappo")


@pytest.mark.parametrize("name", NAMES)
def test_a_resolved_spec_reads_back_to_itself(tmp_path: Path, name: str) -> None:
    spec = load_spec(CONFIGS / "algorithms" / f"{name}.yaml")
    (tmp_path / "spec.yaml").write_text(resolved_yaml(spec))
    assert load_spec(tmp_path / "spec.yaml") == spec


def test_a_mapping_over_the_stages_of_a_parent_changes_them_by_name(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text(
        f"extends: {CONFIGS / 'demo.yaml'}\nstages:\n  grpo: {{steps: 7, algorithm: {{advantage: rloo}}}}\n"
    )
    stage = rl_stage(load_spec(child))
    assert (stage.steps, stage.prompts_per_step, stage.algorithm.advantage.kind) == (7, 32, "rloo")
    child.write_text(f"extends: {CONFIGS / 'demo.yaml'}\nstages:\n  grppo: {{steps: 7}}\n")
    with pytest.raises(SpecError, match=r"child.yaml:3.*no single list item is called `grppo`"):
        load_spec(child)
