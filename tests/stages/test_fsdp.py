"""`policy.backend: fsdp` through a pipeline: trained, killed, resumed and exported; and what it lacks is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, Olmo2Config, Olmo2ForCausalLM

from nemo_rl_like.artifacts.errors import NrlError, SpecError
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.stages.preflight import check_groups, check_model, require_sampler
from nemo_rl_like.stages.shapes import config_of
from tests.stages.killing import finish, metric_lines, tensor_files, write_rows, write_tiny
from tests.tiny_folders import save_llama

CHARACTERS = "0123456789+="
SPEC = """
seed: 3
output: OUTPUT
model: {path: FOLDER/model}
policy: {backend: fsdp, rows: packed, micro_batch_tokens: 256, threads_per_rank: 1}
stages:
  - kind: sft
    data: {path: FOLDER/sums.jsonl}
    steps: 6
    examples_per_step: 8
    ema: {decay: 0.5, use: false}
    optimizer: {lr: 1.0e-2, weight_decay: 0.1}
    checkpoint: {every_steps: 2, keep_last: 9}
  - kind: export
"""
MARK = "optimizer.mid"


def olmo2(folder: Path) -> Path:
    """A model of an architecture that Megatron's weight map lacks, with a tokenizer."""
    tokenizer = character_tokenizer(CHARACTERS)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Olmo2Config(vocab_size=len(tokenizer), max_position_embeddings=32, pad_token_id=None, **shape)
    Olmo2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder


def arguments_of(output: Path, *more: str) -> list[str]:
    said = [(f"{a}+{b}=", str(a + b)) for a in range(6) for b in range(5)]
    messages = [[{"role": "user", "content": x}, {"role": "assistant", "content": y}] for x, y in said]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_rows(output.parent / "sums.jsonl", [{"messages": turns} for turns in messages])
    return ["run", str(write_tiny(output, SPEC, head="")), *more]


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(1500)
def test_a_model_that_megatron_lacks_is_trained_killed_resumed_and_exported(tmp_path: Path) -> None:
    olmo2(tmp_path / "model")
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    assert finish(arguments_of(whole), log, 600) == 0, log.read_text()
    assert finish(arguments_of(killed), log, 600, fault=f"{MARK}:4") != 0
    assert finish(arguments_of(killed, "--resume"), log, 600) == 0, log.read_text()
    last = "sft/checkpoints/step_6"
    assert tensor_files(killed / last) == tensor_files(whole / last)
    assert any(file.startswith("average-weights/") for file in tensor_files(whole / last))
    assert metric_lines(killed / "sft") == metric_lines(whole / "sft")
    losses = [line["loss"] for line in metric_lines(whole / "sft") if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    model = AutoModelForCausalLM.from_pretrained(whole / "export" / "model")
    assert isinstance(model, Olmo2ForCausalLM)


# -- refused before anything starts


def spec_of(tmp_path: Path, *overrides: str) -> ExperimentSpec:
    return load_spec(arguments_of(tmp_path / "out")[1], overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.layout.tp=2", "`policy.layout.tp` is 2"),
        ("policy.layout.pp=2", "`policy.layout.pp` is 2"),
        ("policy.layout.cp=2", "`policy.layout.cp` is 2"),
        ("policy.layout={ep: 2, dp: 2}", "`policy.layout.ep` is 2"),
        ("policy.layout={etp: 2, dp: 2}", "`policy.layout.etp` is 2"),
        ("policy.lora={}", "`policy.lora` is given"),
        ("policy.router={z_loss: 0.1}", "`policy.router` is given"),
        ("policy.offload={frozen: true}", "`policy.offload` is given"),
        ("policy.recompute={kind: selective}", "`policy.recompute.modules` is given"),
        ("stages.sft.optimizer={kind: muon}", "`optimizer.kind: muon`"),
        ("stages.sft={kind: evaluate, name: sft}", "`engine.kind: embedded` decodes on Megatron's layers"),
    ],
)
def test_what_fsdp_lacks_is_refused_with_its_field(tmp_path: Path, override: str, words: str) -> None:
    more = ("environment={name: arithmetic}",)
    assert spec_of(tmp_path, *more).policy.backend == "fsdp"
    with pytest.raises((SpecError, ValidationError)) as caught:
        spec_of(tmp_path, *more, override)
    assert words in str(caught.value) and "policy.backend: megatron" in str(caught.value)


def test_fp8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="`policy.fp8` is given"):
        spec_of(tmp_path, "policy.fp8={}", "model.dtype=bfloat16")


def test_an_architecture_that_megatron_lacks_passes_with_fsdp_alone(tmp_path: Path) -> None:
    olmo2(tmp_path / "model")
    spec = spec_of(tmp_path, "stages.sft.optimizer.groups=[{match: '*q_norm.weight', weight_decay: 0.1}]")
    check_model(spec)
    check_groups(spec, spec.stages[0])
    assert config_of(spec).family == "olmo2"
    with pytest.raises(NrlError, match=r"model_type is 'olmo2'.*Set `policy.backend: fsdp`"):
        check_model(spec_of(tmp_path, "policy.backend=megatron"))
    with pytest.raises(SpecError, match="matches no parameter"):
        wrong = spec_of(tmp_path, "stages.sft.optimizer.groups=[{match: '*linear_qkv*'}]")
        check_groups(wrong, wrong.stages[0])
    with pytest.raises(SpecError, match=r"engine.kind: vllm"):
        require_sampler(spec)
    require_sampler(spec_of(tmp_path, "engine.kind=vllm"))


def test_windows_under_the_mask_of_shared_prompts_are_refused(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(CHARACTERS)
    folder = tmp_path / "model"
    tokenizer.save_pretrained(str(save_llama(folder, len(tokenizer))))
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace('"model_type": "llama"', '"model_type": "mistral"').replace("LlamaFor", "MistralFor")
    )
    check_model(spec_of(tmp_path))
    with pytest.raises(SpecError, match="attend within a window"):
        check_model(spec_of(tmp_path, "policy.rows=shared_prefix"))


def test_weights_under_other_names_are_refused(tmp_path: Path) -> None:
    olmo2(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(NrlError, match=r"missing: .*model\.layers\.2"):
        check_model(spec_of(tmp_path))
