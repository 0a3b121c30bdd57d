"""Virtual tokens through a pipeline: RL against the base, killed and resumed, exported for PEFT; and what nothing can be made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.spec.evaluate import EvaluationSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.stages.api import evaluate_checkpoint, export_checkpoint
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
    algorithm: {kl: {coef: 0.05}}
    optimizer: {lr: 1.0e-1}
    checkpoint: {every_steps: 1, keep_last: 9}
  - {kind: export, adapter: true}
"""
TUNED = "policy.adapter={kind: prompt_tuning, tokens: 4}"


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_virtual_tokens_are_trained_exported_and_survive_a_kill(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    given = [(*arguments_of(output, SPEC)[:3], TUNED) for output in (whole, cut)]
    assert finish(list(given[0]), log, 600) == 0, log.read_text()
    lines = metric_lines(whole / "rl")
    assert all(line["kl"] > 0 and line["gap/p99"] < 1e-4 for line in lines)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    plain = logits(base)
    adapted = PeftModel.from_pretrained(base, whole / "export" / "model")
    assert float((logits(adapted)[:, 4:] - plain).abs().max()) > 1e-2
    assert finish(list(given[1]), log, 600, fault="optimizer.mid:2") != 0
    assert finish(["resume", str(cut)], log, 600) == 0, log.read_text()
    ends = [tensor_files(run / "rl" / "checkpoints" / "step_3") for run in (whole, cut)]
    assert ends[0] == ends[1] and any(name.startswith("adapter/") for name in ends[0])
    assert metric_lines(cut / "rl") == metric_lines(whole / "rl")
    with pytest.raises(InputError, match="is of prompt tuning"):
        export_checkpoint(whole, tmp_path / "merged", 1.0)
    with pytest.raises(InputError, match="is of prompt tuning"):
        evaluate_checkpoint(whole, EvaluationSpec())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": [{"kind": "sft", "data": {"path": "x"}}, {"kind": "evaluate"}]}, "'evaluate' follows the training of virtual tokens"),
        ({"stages": [{"kind": "sft", "data": {"path": "x"}}, {"kind": "export"}]}, "only `export` with `adapter: true` may"),
        ({"stages": [{"kind": "rl"}], "engine": {"kind": "vllm"}}, "`engine.kind` is vllm, which has no virtual tokens"),
        ({"stages": [{"kind": "sft", "data": {"path": "x"}, "ema": {}}]}, "`policy.adapter` trains adapters alone"),
    ],
)  # fmt: skip
def test_what_needs_weights_that_hold_them_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        experiment({"policy": {"adapter": {"tokens": 4}}, **changes})


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"lora": {}, "adapter": {}}, "`lora` and `adapter` are both given"),
        ({"layout": {"pp": 2}, "adapter": {}}, "`layout.pp` is 2, but with `adapter: prompt_tuning`"),
        ({"adapter": {"tokens": 0}}, "greater than 0"),
    ],
)
def test_a_policy_that_cannot_have_them_is_refused(policy: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PolicySpec.model_validate(policy)
