"""Forecasts agree with what is built, drawings place every rank once, and warnings go when their cause goes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.pipeline.forecast import HARDWARE, Role, forecast, shape_from_spec
from nemo_rl_like.pipeline.placement import placement
from nemo_rl_like.pipeline.warnings import warnings_of
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.stages.shapes import shape_of
from tests.tiny_folders import save_llama

CONFIGS = Path(__file__).parents[2] / "configs"
MADE = [CONFIGS / name for name in ("demo.yaml", "experts.yaml", "pipelines/rlhf.yaml", "algorithms/xpo.yaml")]
H100 = HARDWARE["h100"]


def warned(spec: ExperimentSpec, seconds: float = 0.0) -> str:
    return "\n".join(warnings_of(spec, forecast(spec), H100, seconds))


@pytest.mark.parametrize("path", MADE, ids=lambda p: p.stem)
def test_the_shape_is_the_one_that_is_built(path: Path) -> None:
    spec = load_spec(path)
    assert shape_from_spec(spec) == shape_of(spec)


def test_a_tokenizer_folder_gives_its_size(tmp_path: Path) -> None:
    character_tokenizer("0123456789+=").save_pretrained(str(tmp_path))
    spec = load_spec(CONFIGS / "demo.yaml", ["model.tokenizer.characters=null", f"model.tokenizer.path={tmp_path}"])
    assert shape_from_spec(spec) == shape_of(spec)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read"):
        shape_from_spec(spec)


@pytest.mark.parametrize("path", MADE[:2], ids=lambda p: p.stem)
def test_parameters_are_those_of_the_model_but_for_padding(path: Path) -> None:
    spec = load_spec(path)
    counted = sum(math.prod(shape) for shape in WeightMap(shape_of(spec)).hf_shapes().values())
    found = forecast(spec)[0]
    assert counted <= found.parameters < counted * 1.01 + 1024
    assert (found.active_parameters < found.parameters) == (shape_of(spec).experts is not None)


def test_a_teacher_of_another_size_is_forecast_by_its_own_size() -> None:
    sizes = {stage.name: stage.parameters for stage in forecast(load_spec(CONFIGS / "pipelines/distil_reasoner.yaml"))}
    assert sizes["teacher"] == sizes["sample"] > 5 * sizes["student"]


def test_time_grows_with_tokens_and_shrinks_with_ranks() -> None:
    def seconds(*overrides: str) -> float:
        return sum(s.seconds(H100, 0.4) for s in forecast(load_spec(CONFIGS / "demo.yaml", overrides)))

    assert seconds("stages.sft.steps=2000", "stages.grpo.steps=240") == pytest.approx(2 * seconds(), rel=1e-9)
    assert seconds("policy.layout.dp=2") < seconds()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 8))
def test_every_rank_stands_on_one_device_in_order(ranks: list[int], each: int) -> None:
    roles = [Role(f"r{i}", count) for i, count in enumerate(ranks)]
    expected = [(role.name, rank) for role in roles for rank in range(role.ranks)]
    found: dict[tuple[int, int], tuple[str, int]] = {}
    for line in placement(roles, each):
        if not line.startswith("host"):
            continue
        host, _, parts = line.removeprefix("host ").partition("  ")
        for part in parts.split(", "):
            places, name, members = part.split(" ")
            for place, member in zip(numbers(places), numbers(members), strict=True):
                assert (int(host), place) not in found and place < each
                found[int(host), place] = (name, member)
    assert [found[key] for key in sorted(found)] == expected
    assert [host * each + place for host, place in sorted(found)] == list(range(len(expected)))


def numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        (
            ["launch.nodes=1", "launch.devices_per_node=1", "policy.layout.dp=2"],
            ["launch.nodes=2", "launch.devices_per_node=1", "policy.layout.dp=2"],
            "needs 2 devices, and `launch` takes 1 on 1 host(s)",
        ),
        (["launch.nodes=2", "launch.devices_per_node=1"], ["launch.devices_per_node=1"], "lower `launch.nodes`"),
        (
            ["launch.retries=1"],
            ["launch.retries=1", "stages.sft.checkpoint.every_steps=9"],
            "stage 'sft' saves at its end",
        ),
        (["launch.image=a/b:1"], ["launch.image=a/b@sha256:0"], "pin it by digest"),
        (["secrets.X.env=NO_SUCH_SECRET"], ["secrets.X.env=PATH"], "NO_SUCH_SECRET is not set"),
        (
            ["stages.sft.data={path: no.jsonl}"],
            [f"stages.sft.data={{path: {CONFIGS}/algorithms/sums.jsonl}}"],
            "no.jsonl does not exist",
        ),
        (["model={path: nowhere}"], [], "stage 'sft': nothing is estimated"),
        (
            ["policy.micro_batch_tokens=100000000", "stages.sft.examples_per_step=100000000"],
            [],
            "lower `policy.micro_batch_tokens`",
        ),
    ],
)
def test_a_warning_goes_with_its_cause(wrong: list[str], right: list[str], words: str) -> None:
    assert words in warned(load_spec(CONFIGS / "demo.yaml", wrong))
    assert words not in warned(load_spec(CONFIGS / "demo.yaml", right))


def test_a_run_longer_than_its_limit_is_told() -> None:
    spec = load_spec(CONFIGS / "demo.yaml", ["launch.time_limit_min=60"])
    assert "estimated at 2.0 h" in warned(spec, 7200) and "estimated" not in warned(spec, 3599)


def test_the_model_of_a_folder_is_read_from_its_config(tmp_path: Path) -> None:
    save_llama(tmp_path, 64)
    spec = load_spec(CONFIGS / "demo.yaml", [f"model={{path: {tmp_path}}}"])
    assert shape_from_spec(spec) == ModelConfig.from_hf_folder(tmp_path)
