"""Virtual tokens and prefixes through a pipeline: RL against the base, killed and resumed, exported for PEFT; and what nothing can be made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.stages.api import export_checkpoint
from tests.stages.killing import finish, metric_lines, tensor_files
from tests.stages.test_lora import arguments_of, experiment, logits

SPEC = """
environment: {reward: FOLDER/reward.py:reward_func, prompts: FOLDER/prompts.jsonl}
stages:
  - kind: rl
    steps: 3
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {max_new_tokens: 6}
    evaluate_every_steps: 3
    evaluation: &held_out {max_new_tokens: 6, samples_per_task: 4}
    algorithm: {kl: {coef: 0.05}}
    optimizer: {lr: 1.0e-1}
    checkpoint: {every_steps: 1, keep_last: 9}
  - kind: evaluate
    evaluation: *held_out
  - {kind: export, adapter: true}
"""


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning"])
def test_virtual_tokens_are_trained_exported_and_survive_a_kill(kind: str, tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    tuned = f"policy.adapter={{kind: {kind}, tokens: 4}}"
    given = [[*arguments_of(output, SPEC)[:3], tuned] for output in (whole, cut)]
    assert finish(given[0], log, 600) == 0, log.read_text()
    untrained, *lines = metric_lines(whole / "rl")
    assert "eval/avg@4" in untrained and "loss" not in untrained
    assert all(line["kl"] > 0 and line["gap/p99"] < 1e-4 for line in lines)
    told = json.loads((whole / "evaluate" / "report" / "report.json").read_text())["results"]["rl"]["metrics"]
    assert {name: lines[-1][name] for name in told} == told and "eval/avg@4" in told
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    plain = logits(base)
    adapted = PeftModel.from_pretrained(base, whole / "export" / "model")
    assert float((logits(adapted)[:, -plain.shape[1] :] - plain).abs().max()) > 1e-2
    assert finish(given[1], log, 600, fault="optimizer.mid:2") != 0
    assert finish(["resume", str(cut)], log, 600) == 0, log.read_text()
    ends = [tensor_files(run / "rl" / "checkpoints" / "step_3") for run in (whole, cut)]
    assert ends[0] == ends[1] and any(name.startswith("adapter/") for name in ends[0])
    assert metric_lines(cut / "rl") == metric_lines(whole / "rl")
    with pytest.raises(InputError, match="has virtual tokens"):
        export_checkpoint(whole, tmp_path / "merged", ExportStageSpec())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": [{"kind": "sft", "data": {"path": "x"}}, {"kind": "rl"}]}, "'rl' follows the training of virtual tokens"),
        ({"stages": [{"kind": "sft", "data": {"path": "x"}}, {"kind": "export"}]}, "and `export` with `adapter: true` may"),
        ({"stages": [{"kind": "rl"}], "engine": {"kind": "vllm"}}, "`engine.kind` is vllm, which has no virtual tokens"),
        ({"stages": [{"kind": "sft", "data": {"path": "x"}, "ema": {}}]}, "`policy.adapter` trains adapters alone"),
    ],
)  # fmt: skip
def test_what_needs_weights_that_hold_them_is_refused(changes: dict[str, Any], words: str) -> None:
    for kind, noun in (("prefix_tuning", "virtual tokens"), ("bottleneck", "bottleneck adapters")):
        with pytest.raises(ValidationError, match=words.replace("virtual tokens", noun)):
            experiment({"policy": {"adapter": {"kind": kind}}, **changes})


PROMPT = {"kind": "prompt_tuning"}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"lora": {}, "adapter": PROMPT}, "`lora` and `adapter` are both given"),
        ({"layout": {"pp": 2}, "adapter": PROMPT}, "`layout.pp` is 2, but with `adapter: prompt_tuning`"),
        ({"adapter": {**PROMPT, "tokens": 0}}, "greater than 0"),
        (
            {"adapter": PROMPT, "router": {"replay": "first_pass"}},
            "`router.replay` keeps the experts of a row's own tokens",
        ),
        ({"adapter": {"kind": "bottleneck"}, "router": {"bias_update_rate": 0.1}}, "which `adapter` leaves as it is"),
        (
            {"adapter": {"kind": "prefix_tuning"}, "router": {"z_loss": 0.1}},
            "`router` has losses, but routers see virtual tokens",
        ),
    ],
)
def test_a_policy_that_cannot_have_them_is_refused(policy: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PolicySpec.model_validate(policy)
