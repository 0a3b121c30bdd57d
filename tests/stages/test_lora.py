"""Adapters through a pipeline: SFT, then RL against the start, exported both ways; killed and resumed; and what needs whole weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.pipeline.lineage import find_lineage
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.stages.api import checkpoint_at, export_checkpoint
from tests.generation.tiny_models import scores
from tests.generation.vllm_adapter import served
from tests.stages.killing import finish, metric_lines, tensor_files, write_rows, write_sums, write_tiny
from tests.tiny_folders import save_llama

SPEC = """
environment: {reward: FOLDER/reward.py:reward_func, prompts: FOLDER/prompts.jsonl}
stages:
  - kind: sft
    data: {path: FOLDER/sums.jsonl}
    steps: 3
    examples_per_step: 8
    optimizer: {lr: 1.0e-2}
  - kind: rl
    steps: 4
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {max_new_tokens: 6}
    algorithm: {kl: {coef: 0.05}}
    optimizer: {lr: 1.0e-2}
    checkpoint: {every_steps: 1, keep_last: 9}
  - {kind: export, adapter: true, name: adapter}
  - {kind: export, parity: weights}
"""


def arguments_of(output: Path, stages: str = SPEC) -> list[str]:
    folder = output.parent
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained(save_llama(folder / "model", len(tokenizer), head_dim=32))
    write_sums(folder)
    said = [(f"{a}+{b}=", str(a + b)) for a in range(6) for b in range(5)]
    messages = [[{"role": "user", "content": x}, {"role": "assistant", "content": y}] for x, y in said]
    write_rows(folder / "sums.jsonl", [{"messages": turns} for turns in messages])
    spec = write_tiny(output, stages)
    return [
        "run",
        str(spec),
        f"model={{path: {folder / 'model'}}}",
        "policy.lora={rank: 4, targets: [q_proj, v_proj, down_proj]}",
    ]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.arange(4, 16)[None]).logits
    return out


@pytest.mark.service
@pytest.mark.timeout(900)
def test_adapters_are_trained_exported_and_survive_a_kill(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    assert finish(arguments_of(whole), log, 600) == 0, log.read_text()
    lines = metric_lines(whole / "rl")
    assert lines[0]["kl"] == 0.0 < lines[-1]["kl"]
    base = AutoModelForCausalLM.from_pretrained(
        whole / "sft" / "checkpoints" / "step_3" / "weights", dtype=torch.float32
    )
    before = logits(base)
    exported = AutoModelForCausalLM.from_pretrained(whole / "export" / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, whole / "adapter" / "model")
    assert float((logits(adapted) - logits(exported)).abs().max()) <= 1e-5
    assert float((before - logits(exported)).abs().max()) > 1e-3
    said = json.loads((whole / "adapter" / "model" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(whole / "sft" / "checkpoints" / "step_3" / "weights")
    assert finish(arguments_of(cut), log, 600, fault="optimizer.mid:3") != 0
    assert finish(["resume", str(cut)], log, 600, fault="optimizer.mid:4") != 0
    assert finish(["resume", str(cut)], log, 600) == 0, log.read_text()
    for stage, step in (("sft", 3), ("rl", 4)):
        ends = [tensor_files(run / stage / "checkpoints" / f"step_{step}") for run in (whole, cut)]
        assert ends[0] == ends[1] and any(name.startswith("adapter/") for name in ends[0])
        assert metric_lines(cut / stage) == metric_lines(whole / stage)
    lineage = find_lineage(checkpoint_at(whole))
    (again,) = export_checkpoint(whole, tmp_path / "again", ExportStageSpec(adapter=True), lineage)
    assert tensor_names(again) == tensor_names(whole / "adapter" / "model")


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_vllm_gets_the_merged_model(tmp_path: Path) -> None:
    """Each sync compares the log-probs of probe prompts, and each step those of what was sampled."""
    engine = "engine={kind: vllm, kv_cache_gib: 0.05, threads: 1, max_context: 32}"
    log = tmp_path / "log"
    assert finish([*arguments_of(tmp_path / "run"), engine], log, 600) == 0, log.read_text()
    assert all(line["gap/p99"] < 1e-3 for line in metric_lines(tmp_path / "run" / "rl"))


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_base_in_four_bits_is_trained_and_survives_a_kill(engine: str, tmp_path: Path) -> None:
    """The engine samples from the quantised base with its adapters, and RL begins at its reference."""
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    lora = "policy.lora={rank: 4, targets: [q_proj, v_proj, down_proj], base: {kind: nf4}}"
    chosen = [] if engine == "embedded" else ["engine={kind: vllm, kv_cache_gib: 0.05, threads: 1, max_context: 32}"]
    given = [[*arguments_of(output)[:3], lora, *chosen] for output in (whole, cut)]
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(tmp_path / "model")
    shape.update({"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1})
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "model")
    assert finish(given[0], log, 600) == 0, log.read_text()
    lines = metric_lines(whole / "rl")
    assert lines[0]["kl"] == 0.0 < lines[-1]["kl"] and all(line["gap/p99"] < 1e-3 for line in lines)
    if engine == "embedded":
        assert finish(given[1], log, 600, fault="optimizer.mid:4") != 0
        assert finish(["resume", str(cut)], log, 600) == 0, log.read_text()
        assert metric_lines(cut / "rl") == metric_lines(whole / "rl")


SERVED = """
stages:
  - kind: sft
    data: {path: FOLDER/sums.jsonl}
    steps: 2
    examples_per_step: 8
    optimizer: {lr: 3.0e-2}
  - {kind: export, adapter: true, name: adapter}
  - kind: export
"""


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_vllm_serves_the_exported_adapter_beside_its_base_as_the_merged_export_is(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    given = [*arguments_of(run, SERVED), "policy.lora.rslora=true"]
    assert finish(given, log, 600) == 0, log.read_text()
    prompts = [tuple((7 * i + 3 * j) % 16 for j in range(8 + i)) for i in range(4)]
    found = served(tmp_path / "model", run / "adapter" / "model", prompts, tmp_path)
    apart = 0.0
    for name in ("adapted", "base"):
        folder = run / "export" / "model" if name == "adapted" else tmp_path / "model"
        merged = AutoModelForCausalLM.from_pretrained(run / "export" / "model", dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for prompt, sample in zip(prompts, found[name], strict=True):
            whole = [(*prompt, *sample.ids)]
            want, merged_says = (scores(x, whole)[0][len(prompt) - 1 :] for x in (model, merged))
            assert sample.logprobs == pytest.approx(want, abs=1e-4)
            apart = max(apart, *(abs(x - y) for x, y in zip(want, merged_says, strict=True)))
    assert apart > 1e-2


def tensor_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"kind": "reward_model", "data": {"path": "x"}}, "trains a new head"),
        ({"kind": "sft", "data": {"path": "x"}, "ema": {}}, "averages whole weights"),
        ({"kind": "preference", "data": {"path": "x"}, "reference_sync": {}}, "moves a whole reference"),
        ({"kind": "rl", "algorithm": {"opponent": {"kind": "reference"}, "shaping": [{"kind": "win_rate"}]}}, "`opponent`"),
        ({"kind": "rl", "algorithm": {"kl": {"coef": 0.1}}, "own_ranks": ["reference"]}, "take it out of `own_ranks`"),
    ],
)  # fmt: skip
def test_what_needs_whole_weights_is_refused(stage: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        experiment({"policy": {"lora": {}}, "stages": [stage]})


def experiment(changes: dict[str, object]) -> ExperimentSpec:
    common = {"output": "x", "model": {"path": "x"}, "environment": {"name": "arithmetic"}}
    return ExperimentSpec.model_validate({**common, **changes})


def test_adapters_that_nobody_trains_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"`adapter: true`, but nothing trains adapters"):
        experiment({"stages": [{"kind": "export", "adapter": True}]})
    with pytest.raises(ValidationError, match="should be greater than 0"):
        experiment({"policy": {"lora": {"rank": 0}}, "stages": [{"kind": "export"}]})


def test_scale_is_that_of_the_papers() -> None:
    spec = load_spec(Path(__file__).parents[2] / "configs" / "demo.yaml", ["policy.lora={rank: 16, alpha: 32.0}"])
    lora = spec.policy.lora
    assert lora is not None and lora.scale == 2.0
    assert lora.model_copy(update={"rslora": True}).scale == 8.0
