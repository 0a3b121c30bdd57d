"""SFT with a moving average and text on Ray: the average is that of the weights, is handed on, and survives a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.stages.api import export_checkpoint
from tests.stages.killing import finish, outcome, tensor_files, write_rows, write_spec, write_tiny

STEPS, DECAY = 4, 0.75
SPEC = """
name: averaged
stages:
  - kind: sft
    data: {path: FOLDER/sums.jsonl}
    steps: STEPS
    examples_per_step: 8
    ema: {decay: DECAY}
    ptx: {paths: [FOLDER/text.txt], coef: 0.5, rows_per_step: 2, sequence_tokens: 16}
    z_loss: 1.0e-3
    optimizer: {lr: 1.0e-2}
    checkpoint: {every_steps: 1, keep_last: 9}
"""


def written(output: Path) -> Path:
    """Sums with weights, text of digits, and a spec that trains on both."""
    rows = []
    for a in range(6):
        for b in range(5):
            answer = {"role": "assistant", "content": str(a + b), "weight": 0.5 + a % 2}
            rows.append({"messages": [{"role": "user", "content": f"{a}+{b}="}, answer]})
    write_rows(output.parent / "sums.jsonl", rows)
    write_text(output.parent)
    return write_tiny(output, SPEC.replace("STEPS", str(STEPS)).replace("DECAY", str(DECAY)))


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("\n\n".join("123456789"[i % 5 :] * 2 for i in range(20)))


@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_text_beside_rewards_survives_a_kill(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write_text(tmp_path)
    ptx = f"stages.rl.ptx={{paths: [{tmp_path}/text.txt], rows_per_step: 2, sequence_tokens: 16}}"
    specs = {name: str(write_spec(tmp_path, tmp_path / name, steps=4)) for name in ("whole", "cut")}
    assert finish(["run", specs["whole"], ptx], log, 600) == 0, log.read_text()
    assert finish(["run", specs["cut"], ptx], log, 600, fault="optimizer.mid:6") != 0
    assert finish(["run", specs["cut"], ptx, "--resume"], log, 600) == 0, log.read_text()
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    losses = [line["ptx/loss"] for line in outcome(tmp_path / "whole").metrics]
    assert losses[-1] < losses[0]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with SafetensorsReader(folder) as reader:
        return {name: reader.get(name).double() for name in reader.keys()}


@pytest.mark.service
@pytest.mark.timeout(900)
def test_the_average_is_that_of_the_weights_is_handed_on_and_survives_a_kill(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    assert finish(["run", str(written(whole))], log, 600) == 0, log.read_text()
    steps = [whole / "sft" / "checkpoints" / f"step_{i}" for i in range(1, STEPS + 1)]
    average = tensors(steps[0] / "average-weights")
    for step in steps[1:]:
        now = tensors(step / "weights")
        average = {name: DECAY * average[name] + (1 - DECAY) * now[name] for name in average}
        for name, value in tensors(step / "average-weights").items():
            assert float((value - average[name]).abs().max()) < 1e-6, name
    handed = json.loads((whole / "status.json").read_text())["stages"]["sft"]["output"]
    assert (handed["kind"], handed["path"]) == ("Checkpoint", f"sft/averaged/step_{STEPS}")
    export_checkpoint(whole, tmp_path / "exported", ExportStageSpec(parity="weights"))
    for name, value in tensors(tmp_path / "exported").items():
        assert float((value - average[name]).abs().max()) < 1e-6, name
    metrics = [json.loads(line) for line in (whole / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["ptx/loss"] > 0 and line["z_loss"] > 0 for line in metrics)
    spec = written(cut)
    assert finish(["run", str(spec)], log, 600, fault="optimizer.mid:3") != 0
    assert finish(["run", str(spec), "--resume"], log, 600) == 0, log.read_text()
    for end in (f"sft/checkpoints/step_{STEPS}", f"sft/averaged/step_{STEPS}"):
        assert tensor_files(cut / end) == tensor_files(whole / end)
