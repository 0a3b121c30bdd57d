"""Laws of finding environments: a wrong name or setting says what is near and what there is."""

import subprocess
import sys

import pytest

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.environment.registry import BUILT_IN, available, resolve, source_class, with_absolute_paths
from nemo_rl_like.environment.types import NoDemonstration, Step
from nemo_rl_like.spec.environment import EnvironmentSpec

SOURCES = "tests.environment.sample_sources"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_name_resolves(name):
    assert source_class(name).__name__
    assert [e.target for e in available() if e.name == name] == [BUILT_IN[name]]


def test_an_unknown_name_lists_the_nearest_and_all():
    with pytest.raises(
        SpecError, match=r"'arithmetics' is unknown \(did you mean 'arithmetic'\?\); known are arithmetic, calc"
    ):
        resolve(EnvironmentSpec(name="arithmetics"))


def test_a_class_is_found_by_module_and_name():
    assert resolve(EnvironmentSpec(name=f"{SOURCES}:Echo")).tasks("train")[0].id == "train-0"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{SOURCES}:Ecko", r"has no 'Ecko'; its environments are \['BadGrader', 'Echo'"),
        (f"{SOURCES}:NotASource", "not a subclass of"),
        ("nemo_rl_like.environment.types:SingleTurnSource", "does not define prompt, score, tasks"),
        ("no_such_package.mod:Class", "needs module 'no_such_package', which is not installed"),
    ],
)
def test_a_class_that_cannot_be_used_says_why(name, said):
    with pytest.raises(SpecError, match=said):
        resolve(EnvironmentSpec(name=name))


def test_an_unknown_setting_names_its_path_and_the_nearest_key():
    with pytest.raises(
        SpecError, match=r"environment\.config\.digit: unknown key \(did you mean `digits`\?\); the keys of arith"
    ):
        resolve(EnvironmentSpec(name="arithmetic", config={"digit": 2}))
    with pytest.raises(SpecError, match=r"environment\.config\.noise\.probability: .* less than or equal to 1"):
        resolve(EnvironmentSpec(name="arithmetic", config={"noise": {"probability": 2}}))


def test_paths_become_absolute_and_modules_stay(tmp_path):
    spec = EnvironmentSpec(reward="reward.py:f", prompts="p.jsonl")
    done = with_absolute_paths(spec, tmp_path)
    assert (done.reward, done.prompts) == (f"{tmp_path}/reward.py:f", f"{tmp_path}/p.jsonl")
    assert with_absolute_paths(EnvironmentSpec(reward="pkg.mod:f", prompts="p"), tmp_path).reward == "pkg.mod:f"


def test_a_source_without_demonstrations_says_what_to_do():
    source = resolve(EnvironmentSpec(name=f"{SOURCES}:Echo"))
    with pytest.raises(NoDemonstration, match="Echo has no demonstrations; give the `sft` stage a `data.path`"):
        source.demonstration(source.tasks("train")[0])


def test_a_step_must_end_the_episode_or_say_something():
    with pytest.raises(ValueError, match="at least one message"):
        Step(reward=1.0)
    with pytest.raises(ValueError, match="may not have the name `reward`"):
        Step(rewards={"reward": 1.0}, terminated=True)


def test_the_room_imports_no_heavy_package():
    code = (
        "import sys, nemo_rl_like.environment.pool, nemo_rl_like.environment.worker\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'vllm', 'megatron') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
