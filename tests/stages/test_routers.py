"""DeepSeek-V3's layers through a pipeline: RL with biases that balance experts and replayed choices; killed, resumed and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.model.router import ENGINE_DIFFERS, ROUTER_METRICS
from tests.model import tiny
from tests.stages.killing import finish, metric_lines, tensor_files, write_sums, write_tiny

RATE, STEPS = 0.01, 3
SPEC = """
environment: {reward: FOLDER/reward.py:reward_func, prompts: FOLDER/prompts.jsonl}
stages:
  - kind: rl
    steps: 3
    prompts_per_step: 4
    samples_per_prompt: 4
    updates_per_batch: 2
    sampling: {max_new_tokens: 6}
    optimizer: {lr: 1.0e-3}
    checkpoint: {every_steps: 1, keep_last: 9}
  - kind: export
"""


def arguments_of(output: Path, replay: str) -> list[str]:
    folder = output.parent
    tiny.make_model("deepseek_v3").save_pretrained(folder / "model")
    character_tokenizer("0123456789+=").save_pretrained(str(folder / "model"))
    write_sums(folder)
    router = f"policy.router={{bias_update_rate: {RATE}, replay: {replay}}}"
    return ["run", str(write_tiny(output, SPEC)), f"model={{path: {folder / 'model'}}}", router]


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.parametrize("replay", ["first_pass", "engine"])
def test_biases_and_replayed_choices_survive_a_kill_and_are_exported(tmp_path: Path, replay: str) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    assert finish(arguments_of(whole, replay), log, 600) == 0, log.read_text()
    lines = metric_lines(whole / "rl")
    assert len(lines) == STEPS and all(name in lines[-1] for name in ROUTER_METRICS)
    # The engine is the policy; biases that move between steps move for both.
    assert [line.get(ENGINE_DIFFERS) for line in lines] == [0.0 if replay == "engine" else None] * STEPS
    before, after = (load_file(f / "model.safetensors") for f in (tmp_path / "model", whole / "export" / "model"))
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    moved = torch.stack([(after[name] - before[name]) / RATE for name in biases])
    assert moved.any() and (moved - moved.round()).abs().max() < 1e-3 and moved.abs().max() <= 2 * STEPS + 1e-3
    exported = AutoModelForCausalLM.from_pretrained(whole / "export" / "model", dtype=torch.float32)
    assert torch.isfinite(exported(torch.arange(4, 16)[None]).logits).all()
    assert finish(arguments_of(cut, replay), log, 600, fault="optimizer.mid:3") != 0
    assert finish(["resume", str(cut)], log, 600) == 0, log.read_text()
    ends = [tensor_files(run / "rl" / "checkpoints" / f"step_{STEPS}") for run in (whole, cut)]
    assert ends[0] == ends[1]
    assert metric_lines(cut / "rl") == lines
