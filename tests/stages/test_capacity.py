"""What disk and memory surely need is refused when it is not there, and never otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import safe_open

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.stages import capacity
from nemo_rl_like.stages.capacity import (
    amount,
    check_disk,
    check_memory,
    checkpoint_bytes,
    kept_at_once,
    parameters,
    state_bytes,
)
from tests.tiny_folders import save_llama

SPEC = """
output: FOLDER/out
model: {path: FOLDER/model}
environment: {name: arithmetic}
cluster: {devices: 4}
stages:
  - kind: sft
    data: {environment_demonstrations: true}
    steps: 10
    checkpoint: {every_steps: 4, keep_last: 1, keep_best: 1}
  - kind: rl
    steps: 10
    prompts_per_step: 2
    optimizer: {kind: sgd, momentum: 0.0}
"""


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def spec(tmp_path: Path) -> ExperimentSpec:
    save_llama(tmp_path / "model", 64)
    return spec_of(tmp_path)


def spec_of(folder: Path, *overrides: str) -> ExperimentSpec:
    file = folder / "spec.yaml"
    file.write_text(SPEC.replace("FOLDER", str(folder)))
    return load_spec(file, overrides)


def elements(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())


def test_parameters_are_those_of_the_file(spec: ExperimentSpec, tmp_path: Path) -> None:
    assert parameters(spec) == elements(tmp_path / "model/model.safetensors")


def test_a_disk_that_holds_the_checkpoints_to_the_byte_is_enough(
    spec: ExperimentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sft, rl = spec.stages
    count = parameters(spec)
    assert (checkpoint_bytes(spec, sft), checkpoint_bytes(spec, rl)) == (12 * count, 4 * count)
    assert (kept_at_once(sft), kept_at_once(rl)) == (3, 1)
    needed = 3 * 12 * count + 4 * count
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed))
    check_disk(spec)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed - 1))
    with pytest.raises(InputError, match=r"`output` .* the largest is stage 'sft'.*keep_last") as caught:
        check_disk(spec)
    assert " 0.0 " not in str(caught.value)


def test_amounts_are_told_in_units_in_which_they_are_not_nothing() -> None:
    assert [amount(n) for n in (3 << 30, 150 << 20, 3_000_000)] == ["3.0 GiB", "0.1 GiB", "2.9 MiB"]


def test_what_the_run_has_written_before_counts_as_room(spec: ExperimentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 40 * parameters(spec)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed - 1000))
    Path(spec.output).mkdir()
    (Path(spec.output) / "old").write_bytes(bytes(1000))
    check_disk(spec)


@pytest.mark.parametrize(
    ("overrides", "each", "ranks"),
    [
        ((), 16, 1),
        (("policy.layout.tp=2",), 8, 2),
        (("policy.layout.dp=2",), 12, 2),
        (("policy.lora={rank: 2}",), 4, 1),
        (("policy.offload.optimizer=true",), 8, 1),
    ],
)
def test_memory_is_what_every_rank_surely_holds(
    spec: ExperimentSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    each: int,
    ranks: int,
) -> None:
    spec = spec_of(tmp_path, *overrides)
    sft = spec.stages[0]
    needed = each * parameters(spec)
    assert state_bytes(spec, sft) == needed
    monkeypatch.setattr(capacity, "host_memory", lambda: needed * ranks)
    check_memory(spec, sft)
    monkeypatch.setattr(capacity, "host_memory", lambda: needed * ranks - 1)
    with pytest.raises(InputError, match=r"stage 'sft': weights, gradients and optimizer state take .*`nrl layout`"):
        check_memory(spec, sft)


def test_a_reference_on_the_same_ranks_is_counted(spec: ExperimentSpec, tmp_path: Path) -> None:
    with_kl = spec_of(tmp_path, "stages.rl.algorithm.kl.coef=0.1")
    assert state_bytes(with_kl, with_kl.stages[1]) - state_bytes(spec, spec.stages[1]) == 4 * parameters(spec)


def test_this_host_has_memory() -> None:
    assert 1 << 28 < capacity.host_memory() < 1 << 50
