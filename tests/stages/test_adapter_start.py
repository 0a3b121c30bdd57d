"""Runs that start from a base with unmerged PEFT adapters: what is refused before anything starts, what a stage's key has, and whole pipelines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from trl import SFTConfig, SFTTrainer
from typer.testing import CliRunner

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cli.app import app
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.export.hf import copy_adapters
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.merged_reader import MergedReader, open_weights
from nemo_rl_like.pipeline.keys import ingredients
from nemo_rl_like.policy.store import write_adapter_config
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.policy import LoraSpec
from nemo_rl_like.stages.preflight import check_model
from nemo_rl_like.stages.start_model import start_model
from tests.stages.killing import finish, metric_lines, write_rows, write_sums, write_tiny
from tests.tiny_folders import save_llama

TOKENIZER = character_tokenizer("0123456789+=")
IDS = torch.arange(4, 16)[None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    TOKENIZER.save_pretrained(save_llama(tmp_path / "base", len(TOKENIZER), head_dim=32))
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """PEFT's, with B drawn."""
    return save_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])


def save_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    torch.manual_seed(4)
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def spec_of(base: Path, adapter: Path, **more: Any) -> ExperimentSpec:
    raw = {
        "output": "out",
        "model": {"path": str(base), "adapter": str(adapter)},
        "environment": {"name": "arithmetic"},
    }
    return ExperimentSpec.model_validate({**raw, "stages": [{"kind": "rl", "steps": 1}], **more})


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(IDS).logits
    return out


def adapted_logits(base: Path, adapter: Path) -> torch.Tensor:
    return logits_of(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    )


def test_a_stage_starts_from_a_folder_whose_weights_are_the_merged_ones(
    base: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(base, adapter)
    check_model(spec)
    (tmp_path / "stage").mkdir()
    start = start_model(spec, tmp_path / "stage", None)
    again = start_model(spec, tmp_path / "stage", None)  # a stage that is resumed
    assert again == start and start.initialize is None and not caplog.records
    with open_weights(start.folder) as read, MergedReader(base, adapter) as merged:
        assert all(torch.equal(read.get(name), merged.get(name)) for name in merged.keys())
    assert AutoTokenizer.from_pretrained(start.folder).get_vocab() == TOKENIZER.get_vocab()
    shutil.move(base, tmp_path / "moved")
    start_model(spec_of(tmp_path / "moved", adapter), tmp_path / "stage", None)
    assert f"names the base '{base}'; make sure that they are one model" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, r"`model.adapter` is '.*adapter', which is not a folder \(looked in"),
        (lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"), r"are a pickle \(adapter_model.bin\), which is not read: it may run code"),
        (lambda a: (a / "adapter_model.safetensors").unlink(), "which has no adapter_model.safetensors; give a folder that PEFT's"),
        (lambda a: (shutil.move(a, a.parent / "c"), a.mkdir()) and shutil.move(a.parent / "c", a / "checkpoint-2"), "holds adapters in checkpoint-2; give '"),
        (lambda a: (a / "adapter_config.json").write_text('{"peft_type": "IA3"}'), "`peft_type` is 'IA3', and only LORA can be merged"),
    ],
    ids=["none", "pickle", "half", "below", "kind"],
)  # fmt: skip
def test_what_is_no_folder_of_adapters_is_refused_with_its_field(
    change: Any, words: str, base: Path, adapter: Path
) -> None:
    change(adapter)
    with pytest.raises(InputError, match=words):
        check_model(spec_of(base, adapter))


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_adapters_of_another_base_are_refused_before_anything_starts(
    backend: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    policy = {"policy": {"backend": backend, "rows": "packed"}, "engine": {"kind": "vllm"}}
    check_model(spec_of(base, adapter, **policy))
    other = save_llama(tmp_path / "other", len(TOKENIZER), layers=1, head_dim=32)
    TOKENIZER.save_pretrained(other)
    with pytest.raises(
        InputError, match=r"2 of 4 adapters belong to no tensor of .*other: .*layers.1.* names '.*base'"
    ):
        check_model(spec_of(other, adapter, **policy))


def test_an_architecture_that_megatron_lacks_starts_from_adapters_with_fsdp(tmp_path: Path) -> None:
    shape = GPT2Config(vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=4, n_positions=64)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "gpt2")
    TOKENIZER.save_pretrained(tmp_path / "gpt2")
    adapter = save_adapter(tmp_path / "gpt2", tmp_path / "adapter", target_modules=["c_attn", "c_proj"])
    check_model(spec_of(tmp_path / "gpt2", adapter, policy={"backend": "fsdp"}, engine={"kind": "vllm"}))


def test_the_adapters_content_is_in_the_key(base: Path, adapter: Path) -> None:
    spec = spec_of(base, adapter)
    before = ingredients(spec.stages[0], spec, {})
    assert before == ingredients(spec.stages[0], spec, {})
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    after = ingredients(spec.stages[0], spec, {})
    assert [line.split(":")[0] for line in after.changes_from(before.values)] == ["file.model.adapter"]
    assert after.key != before.key


def test_explain_tells_another_base_and_names_both_folders(base: Path, adapter: Path, tmp_path: Path) -> None:
    shutil.move(base, tmp_path / "moved")
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(spec_of(tmp_path / "moved", adapter).model_dump(mode="json")))
    told = json.loads(CliRunner().invoke(app, ["explain", str(file), "--json"]).output)
    assert any(f"names the base {str(base)!r}" in line for line in told["warnings"])
    assert {value["path"] for value in told["values"] if value["value"] == str(adapter)} == {"model.adapter"}


def test_a_spec_without_a_base_and_an_export_of_adapters_over_a_merged_one_are_refused(
    base: Path, adapter: Path
) -> None:
    init = {"model": {"init": {}, "tokenizer": {"characters": "01"}, "adapter": str(adapter)}}
    with pytest.raises(ValidationError, match="`adapter` is merged into the model of `path`"):
        spec_of(base, adapter, **init)
    sft = {"kind": "sft", "data": {"path": "rows.jsonl"}}
    lora = {"policy": {"lora": {"rank": 2}}}
    spec_of(base, adapter, **lora, stages=[sft, {"kind": "export"}])
    spec_of(base, adapter, **lora, stages=[sft, {"kind": "rl"}, {"kind": "export", "adapter": True}])
    with pytest.raises(
        ValidationError, match=r"exports the adapters of 'sft' \(`policy.lora`\), whose base is `model.path` with"
    ):
        spec_of(base, adapter, **lora, stages=[sft, {"kind": "export", "adapter": True}])


def test_adapters_over_a_merged_base_say_so_and_are_not_exported(base: Path, adapter: Path, tmp_path: Path) -> None:
    """Also where the spec is not there to tell."""
    stage, checkpoint = tmp_path / "stage", tmp_path / "checkpoint"
    (checkpoint / "adapter").mkdir(parents=True)
    stage.mkdir()
    start = start_model(spec_of(base, adapter), stage, None)
    config = ModelConfig.from_hf_folder(base)
    file = checkpoint / "adapter" / "adapter_config.json"
    write_adapter_config(file, LoraSpec(), config, start.folder)
    said = json.loads(file.read_text())
    assert (said["base_model_name_or_path"], said["base_adapter"]) == (str(base), str(adapter))
    with pytest.raises(
        InputError, match=rf"belong to {base} with {adapter} merged .*`nrl model merge {base} {adapter} MERGED`"
    ):
        copy_adapters(checkpoint, tmp_path / "out")


@pytest.mark.slow
def test_the_folder_that_trl_leaves_is_a_start(base: Path, tmp_path: Path) -> None:
    """Its own trainer takes a step and saves, with the head beside the adapters."""
    untied = save_llama(tmp_path / "untied", len(TOKENIZER), tied=False)
    TOKENIZER.save_pretrained(untied)
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 4})
    arguments = SFTConfig(
        output_dir=str(tmp_path / "trl"), max_steps=2, learning_rate=0.05, per_device_train_batch_size=2, report_to=[], save_strategy="steps", save_steps=1,
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    peft = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(str(untied), args=arguments, train_dataset=rows, peft_config=peft)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "trl" / "checkpoint-1"):
        check_model(spec_of(untied, folder))
        with MergedReader(untied, folder) as ours:
            merged = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
            merged.load_state_dict({name: ours.get(name) for name in ours.keys()})
        theirs = adapted_logits(untied, folder)
        assert float((logits_of(merged) - theirs).abs().max()) <= 1e-5
        assert float((logits_of(AutoModelForCausalLM.from_pretrained(untied)) - theirs).abs().max()) > 1e-3


ADAPTED = """
stages:
  - kind: sft
    data: {path: FOLDER/sums.jsonl}
    steps: 2
    examples_per_step: 8
    optimizer: {lr: 3.0e-2}
  - {kind: export, adapter: true, name: adapter}
  - {kind: export, parity: weights}
"""
STARTED = """
environment: {reward: FOLDER/reward.py:reward_func, prompts: FOLDER/prompts.jsonl}
stages:
  - kind: rl
    steps: 2
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {max_new_tokens: 6}
    algorithm: {advantage: {kind: gae}, kl: {coef: 0.05}}
    optimizer: {lr: 1.0e-30}
  - kind: export
"""
LAYOUTS = {
    "tp": "policy.layout={tp: 2, sp: true}",
    "pp": "policy.layout={pp: 2}",
    "vllm": "engine={kind: vllm, kv_cache_gib: 0.05, threads: 1, max_context: 32}",
}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", LAYOUTS)
def test_a_run_over_exported_adapters_is_the_run_that_trained_them(how: str, base: Path, tmp_path: Path) -> None:
    """Policy, reference, critic and engine all start from the merged weights: the first KL is 0, the engine's gap small, and the export the same."""
    log = tmp_path / "log"
    write_sums(tmp_path)
    said = [(f"{a}+{b}=", str(a + b)) for a in range(6) for b in range(5)]
    turns = [[{"role": "user", "content": x}, {"role": "assistant", "content": y}] for x, y in said]
    write_rows(tmp_path / "sums.jsonl", [{"messages": one} for one in turns])
    lora = "policy.lora={rank: 4, targets: [q_proj, v_proj, down_proj]}"
    first = ["run", str(write_tiny(tmp_path / "first", ADAPTED)), f"model={{path: {base}}}", lora]
    assert finish(first, log, 600) == 0, log.read_text()
    adapter = tmp_path / "first" / "adapter" / "model"
    second = ["run", str(write_tiny(tmp_path / "second", STARTED)), f"model={{path: {base}, adapter: {adapter}}}"]
    assert finish([*second, LAYOUTS[how]], log, 600) == 0, log.read_text()
    lines = metric_lines(tmp_path / "second" / "rl")
    assert lines[0]["kl"] == lines[1]["kl"] == 0.0 and lines[0]["gap/p99"] < 1e-3
    exported = [
        AutoModelForCausalLM.from_pretrained(tmp_path / run / "export" / "model", dtype=torch.float32)
        for run in ("first", "second")
    ]
    ours, theirs = map(logits_of, exported)
    assert float((ours - theirs).abs().max()) <= 1e-5
    assert float((ours - adapted_logits(base, adapter)).abs().max()) <= 1e-5
    assert float((ours - logits_of(AutoModelForCausalLM.from_pretrained(base))).abs().max()) > 1e-2
    card = (tmp_path / "second" / "export" / "model" / "README.md").read_text()
    assert f"`{base}`, with the adapters of `{adapter}` merged into it" in card
