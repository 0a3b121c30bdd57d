"""Runs that go on training adapters of a PEFT folder: two runs of N steps are one of 2N, and an earlier stage's weights hold them already."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.types import Checkpoint
from nemo_rl_like.pipeline.keys import ingredients
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.preflight import check_model
from nemo_rl_like.stages.start_model import adapters_of, start_model
from tests.stages.killing import finish, write_rows, write_tiny
from tests.stages.test_adapter_start import TOKENIZER, adapted_logits, logits_of, save_adapter
from tests.tiny_folders import save_llama

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
SFT = {"kind": "sft", "data": {"environment_demonstrations": True}}


def spec_of(base: Path, adapter: Path | None, **changes: object) -> ExperimentSpec:
    lora = {**LORA, "path": None if adapter is None else str(adapter), **changes}
    raw = {
        "output": "out",
        "model": {"path": str(base)},
        "policy": {"lora": lora},
        "environment": {"name": "arithmetic"},
    }
    return ExperimentSpec.model_validate({**raw, "stages": [SFT, {**SFT, "name": "again"}]})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    TOKENIZER.save_pretrained(save_llama(tmp_path / "base", len(TOKENIZER)))
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])


def test_the_folder_is_checked_before_anything_starts_and_its_content_is_in_the_key(base: Path, adapter: Path) -> None:
    spec = spec_of(base, adapter)
    check_model(spec)
    with pytest.raises(InputError, match="`policy.lora.rank` is `2`, and in "):
        check_model(spec_of(base, adapter, rank=2))
    before = ingredients(spec.stages[0], spec, {})
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    after = ingredients(spec.stages[0], spec, {})
    assert [line.split(":")[0] for line in after.changes_from(before.values)] == ["file.policy.lora.path"]
    shutil.rmtree(adapter)
    with pytest.raises(InputError, match="`policy.lora.path` is '.*adapter', which is not a folder"):
        check_model(spec)


def test_a_stage_behind_another_has_new_adapters(base: Path, adapter: Path, tmp_path: Path) -> None:
    spec = spec_of(base, adapter)
    first = adapters_of(spec.policy, start_model(spec, tmp_path, None))
    shutil.copytree(base, tmp_path / "step_2" / "weights")
    second = adapters_of(spec.policy, start_model(spec, tmp_path, Checkpoint(tmp_path / "step_2", "")))
    assert first == spec.policy and second == spec_of(base, None).policy


def test_adapters_that_are_merged_already_are_refused(base: Path, adapter: Path) -> None:
    values = spec_of(base, adapter).model_dump(mode="json")
    values["model"]["adapter"] = str(adapter)
    with pytest.raises(ValidationError, match="are both '.*adapter', whose adapters would count twice"):
        ExperimentSpec.model_validate(values)


HALF = """
stages:
  - kind: sft
    data: {path: FOLDER/sums.jsonl}
    steps: STEPS
    examples_per_step: 8
    optimizer: {kind: sgd, momentum: 0.0, lr: 0.5, clip_grad: 0.0}
    checkpoint: {every_steps: 1, keep_last: 9}
  - {kind: export, adapter: true, name: adapter}
  - kind: sft
    name: again
    init_from: sft
    data: {path: FOLDER/sums.jsonl}
    steps: 1
    examples_per_step: 8
    optimizer: {lr: 1.0e-30}
  - {kind: export, parity: weights}
"""


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["{}", "{tp: 2}", "{pp: 2}", "{dp: 2}"])
def test_two_halves_are_a_whole_run_where_the_optimizer_has_no_state(layout: str, base: Path, tmp_path: Path) -> None:
    """The second half is killed and resumed on its way; the stage behind it starts from weights that hold the adapters once."""
    log = tmp_path / "log"
    turns = [[{"role": "user", "content": f"{a}+1="}, {"role": "assistant", "content": str(a + 1)}] for a in range(8)]
    write_rows(tmp_path / "sums.jsonl", [{"messages": one} for one in turns])

    def arguments(name: str, steps: int, *more: str) -> list[str]:
        spec = write_tiny(tmp_path / name, HALF.replace("STEPS", str(steps)))
        return ["run", str(spec), f"model={{path: {base}}}", *more]

    lora = "policy.lora={rank: 4, alpha: 8.0, targets: [q_proj, down_proj]%s}"
    for name, steps in (("whole", 4), ("first", 2)):
        assert finish(arguments(name, steps, lora % ""), log, 600) == 0, log.read_text()
    start = tmp_path / "first" / "adapter" / "model"
    going_on = arguments("second", 2, lora % f", path: {start}", f"policy.layout={layout}")
    assert finish(going_on, log, 600, fault="optimizer.mid:2") != 0
    assert finish(["resume", str(tmp_path / "second")], log, 600) == 0, log.read_text()
    files = [
        load_file(tmp_path / run / "adapter" / "model" / "adapter_model.safetensors") for run in ("whole", "second")
    ]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, rtol=0, atol=1e-5)
    before = load_file(start / "adapter_model.safetensors")
    assert any(float((files[0][name] - before[name]).abs().max()) > 1e-3 for name in before)
    ours = logits_of(
        AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "export" / "model", dtype=torch.float32)
    )
    theirs = adapted_logits(base, tmp_path / "second" / "adapter" / "model")
    assert float((ours - theirs).abs().max()) <= 1e-5
