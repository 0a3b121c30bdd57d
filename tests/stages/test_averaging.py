"""SFT with a moving average and text on Ray: the average is that of the weights, is handed on, and survives a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nemo_rl_like.checkpoint.layout import verify
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.stages.api import export_checkpoint
from tests.stages.killing import finish, outcome, write_spec

STEPS, DECAY = 4, 0.75
SPEC = """
name: averaged
seed: 3
output: {output}
model:
  init: {{hidden_size: 64, intermediate_size: 96, layers: 2, heads: 2, kv_heads: 2, head_dim: 32, max_positions: 32}}
  tokenizer: {{characters: "0123456789+="}}
policy: {{threads_per_rank: 1}}
stages:
  - kind: sft
    data: {{path: {folder}/sums.jsonl}}
    steps: {steps}
    examples_per_step: 8
    ema: {{decay: {decay}}}
    ptx: {{paths: [{folder}/text.txt], coef: 0.5, rows_per_step: 2, sequence_tokens: 16}}
    z_loss: 1.0e-3
    optimizer: {{lr: 1.0e-2}}
    checkpoint: {{every_steps: 1, keep_last: 9}}
"""


def written(folder: Path, output: Path) -> Path:
    """Sums with weights, text of digits, and a spec that trains on both."""
    rows = []
    for a in range(6):
        for b in range(5):
            answer = {"role": "assistant", "content": str(a + b), "weight": 0.5 + a % 2}
            rows.append({"messages": [{"role": "user", "content": f"{a}+{b}="}, answer]})
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("\n\n".join("123456789"[i % 5 :] * 2 for i in range(20)))
    path = folder / f"{output.name}.yaml"
    path.write_text(SPEC.format(output=output, folder=folder, steps=STEPS, decay=DECAY))
    return path


@pytest.mark.service
@pytest.mark.timeout(900)
def test_text_beside_rewards_survives_a_kill(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "text.txt").write_text("\n\n".join("123456789"[i % 5 :] * 2 for i in range(20)))
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


def files(output: Path, folder: str) -> dict[str, str]:
    """sha256 of every file of tensors."""
    manifest = verify(output / "sft" / folder / f"step_{STEPS}")
    return {f.path: f.sha256 for f in manifest.files if f.path.endswith(".safetensors")}


@pytest.mark.service
@pytest.mark.timeout(900)
def test_the_average_is_that_of_the_weights_is_handed_on_and_survives_a_kill(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    assert finish(["run", str(written(tmp_path, whole))], log, 600) == 0, log.read_text()
    steps = [whole / "sft" / "checkpoints" / f"step_{i}" for i in range(1, STEPS + 1)]
    average = tensors(steps[0] / "average-weights")
    for step in steps[1:]:
        now = tensors(step / "weights")
        average = {name: DECAY * average[name] + (1 - DECAY) * now[name] for name in average}
        for name, value in tensors(step / "average-weights").items():
            assert float((value - average[name]).abs().max()) < 1e-6, name
    handed = json.loads((whole / "status.json").read_text())["stages"]["sft"]["output"]
    assert (handed["kind"], handed["path"]) == ("Checkpoint", f"sft/averaged/step_{STEPS}")
    export_checkpoint(whole, tmp_path / "exported", 1.0)
    for name, value in tensors(tmp_path / "exported").items():
        assert float((value - average[name]).abs().max()) < 1e-6, name
    metrics = [json.loads(line) for line in (whole / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["ptx/loss"] > 0 and line["z_loss"] > 0 for line in metrics)
    spec = written(tmp_path, cut)
    assert finish(["run", str(spec)], log, 600, fault="optimizer.mid:3") != 0
    assert finish(["run", str(spec), "--resume"], log, 600) == 0, log.read_text()
    assert files(cut, "checkpoints") == files(whole, "checkpoints")
    assert files(cut, "averaged") == files(whole, "averaged")
