"""Models of verl, OpenRLHF and NeMo RL are a start where they are Hugging Face folders; of anything else it is told what it is and what makes one of it.

The writers below make the calls of those packages' own savers, in their order, on a tiny model: the packages themselves need GPUs and are not installed here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cli.app import app
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.merged_reader import MergedReader
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.preflight import check_model, check_teacher
from tests.tiny_folders import save_llama


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer("0123456789+=")


@pytest.fixture
def model(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A tiny Llama with a tied head, read from a folder, as the trainers read theirs."""
    base = save_llama(tmp_path / "base", len(tokenizer))
    tokenizer.save_pretrained(base)
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


CHANGED = "model.layers.1.self_attn.q_proj.weight"
Writer = Callable[[Path, PreTrainedModel, PreTrainedTokenizerBase], Path]
"""Saves a model below a folder; returns the folder that a user would name."""


def verl_step(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """verl 0.9.1, `utils/checkpoint/fsdp_checkpoint_manager.py`, `FSDPCheckpointManager.save_checkpoint` of two ranks with the default contents."""
    actor = folder / "global_step_10" / "actor"
    actor.mkdir(parents=True)
    for rank in range(2):
        torch.save(model.state_dict(), actor / f"model_world_size_2_rank_{rank}.pt")
        torch.save({}, actor / f"optim_world_size_2_rank_{rank}.pt")
        torch.save({}, actor / f"extra_state_world_size_2_rank_{rank}.pt")
    model.generation_config.save_pretrained(actor / "huggingface")
    model.config.save_pretrained(actor / "huggingface")
    tokenizer.save_pretrained(actor / "huggingface")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 2}, indent=4))
    return folder / "global_step_10"


def verl_step_with_hf_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The same with `hf_model` among the contents: bfloat16, without the tied head."""
    step = verl_step(folder, model, tokenizer)
    held = {name: tensor.bfloat16() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.to(torch.bfloat16).save_pretrained(step / "actor" / "huggingface", state_dict=held)
    return step / "actor" / "huggingface"


def verl_lora_merged(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """verl 0.9.1, `model_merger/base_model_merger.py`, `save_hf_model_and_tokenizer` of a policy with LoRA."""
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]).to_dict()
    config |= {"peft_type": config["peft_type"].value, "target_modules": list(config["target_modules"])}
    (folder / "lora_adapter").mkdir(parents=True)
    (folder / "lora_adapter" / "adapter_config.json").write_text(json.dumps(config, default=str, indent=4))
    pairs = {}
    for layer in range(model.config.num_hidden_layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        pairs |= {f"{stem}.lora_A.weight": torch.ones(2, 32), f"{stem}.lora_B.weight": torch.ones(32, 2)}
    save_file(pairs, folder / "lora_adapter" / "adapter_model.safetensors")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def openrlhf_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """OpenRLHF 0.11.2, `utils/deepspeed/deepspeed.py`, `DeepspeedStrategy.save_model` at ZeRO 2: clones, so that the tied head may be stored too."""
    model.save_pretrained(folder, state_dict={name: tensor.clone() for name, tensor in model.state_dict().items()})
    model.config.to_json_file(folder / "config.json")
    tokenizer.save_pretrained(folder)
    return folder


def openrlhf_lora(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The same of a `PeftModel`: adapters, the base's config.json and the tokenizer."""
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(folder)
    adapted.config.to_json_file(folder / "config.json")
    tokenizer.save_pretrained(folder)
    return folder


def openrlhf_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """OpenRLHF 0.11.2, `DeepspeedStrategy.save_ckpt`: what `DeepSpeedEngine.save_checkpoint` leaves."""
    step = folder / "_actor" / "global_step5"
    step.mkdir(parents=True)
    torch.save({"module": model.state_dict()}, step / "mp_rank_00_model_states.pt")
    torch.save({}, step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "_actor" / "latest").write_text("global_step5")
    (folder / "_actor" / "zero_to_fp32.py").write_text("")
    return folder / "_actor"


def nemo_rl_step(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """NeMo RL, `utils/native_checkpoint.py`, `save_checkpoint`, in the folder of a step."""
    step = folder / "step_5"
    dcp.save({"model": model.state_dict()}, checkpoint_id=step / "policy" / "weights", no_dist=True)
    tokenizer.save_pretrained(step / "policy" / "tokenizer")
    (step / "config.yaml").write_text("policy: {model_name: base}\n")
    (step / "training_info.json").write_text('{"step": 5}')
    return step


def nemo_rl_megatron_step(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The same of a Megatron policy: a folder of an iteration below `policy/weights`."""
    weights = folder / "step_5" / "policy" / "weights" / "iter_0000000"
    dcp.save({"model": model.state_dict()}, checkpoint_id=weights, no_dist=True)
    torch.save({}, weights / "common.pt")
    return folder / "step_5"


def nemo_rl_converted(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """NeMo RL, `utils/native_checkpoint.py`, `convert_dcp_to_hf`: a pickle."""
    step, found = nemo_rl_step(folder, model, tokenizer), folder / "hf"
    found.mkdir()
    dcp_to_torch_save(step / "policy" / "weights", found / "pytorch_model.bin")
    torch.save(torch.load(found / "pytorch_model.bin")["model"], found / "pytorch_model.bin")
    model.config.save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found


def nemo_rl_consolidated(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """NeMo RL with `save_consolidated`: a whole model in shards beside the training state."""
    step = nemo_rl_step(folder, model, tokenizer)
    target = step / "policy" / "weights" / "model" / "consolidated"
    model.save_pretrained(target, max_shard_size="20KB")
    tokenizer.save_pretrained(target)
    assert len(list(target.glob("*.safetensors"))) > 1
    return target


def spec_of(folder: Path) -> ExperimentSpec:
    raw = {"output": "out", "model": {"path": str(folder)}, "environment": {"name": "arithmetic"}}
    return ExperimentSpec.model_validate({**raw, "stages": [{"kind": "rl", "steps": 1}]})


@pytest.mark.parametrize(
    "write", [verl_step_with_hf_model, openrlhf_model, nemo_rl_consolidated], ids=lambda write: write.__name__
)
def test_a_hugging_face_folder_of_another_trainer_is_a_start_with_the_trainers_weights(
    write: Writer, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    folder = write(tmp_path / "theirs", model, tokenizer)
    torch.save({}, folder / "training_args.bin")  # harmless: nothing opens it
    check_model(spec_of(folder))
    check_teacher(spec_of(folder), str(folder))
    with SafetensorsReader(folder) as read:
        WeightMap(ModelConfig.from_hf_folder(folder)).check(read)
        held = model.state_dict()
        assert set(held) - set(read.keys()) <= {"lm_head.weight"}
        assert all(torch.equal(read.get(name), held[name]) for name in read.keys())


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (verl_step, ["actor holds verl's FSDP shards", "python -m verl.model_merger merge --backend fsdp --local_dir"]),
        (lambda *its: verl_step(*its) / "actor", ["which holds verl's FSDP shards", "save `hf_model` too"]),
        (lambda *its: verl_step(*its) / "actor" / "huggingface", ["which has no weights", "actor holds verl's FSDP shards"]),
        (lambda *its: verl_step_with_hf_model(*its).parents[1], ["holds the model in actor/huggingface; give '"]),
        (verl_lora_merged, ["a base model and, in lora_adapter/, adapters", "/theirs\n  adapter: /", "/theirs/lora_adapter", "to start from the base"]),
        (lambda *its: verl_lora_merged(*its) / "lora_adapter", ["PEFT adapters over a base that adapter_config.json does not name", "('BASE' is no folder here", '\n  path: "BASE"\n  adapter: /']),
        (openrlhf_lora, ["PEFT adapters over '", "/base', no whole model", "/base\n  adapter: /"]),
        (openrlhf_checkpoint, ["holds in global_step5 a checkpoint of DeepSpeed", "`--ckpt.output_dir`"]),
        (nemo_rl_step, ["holds in policy/weights a distributed checkpoint", "convert_dcp_to_hf.py --config STEP/config.yaml --dcp-ckpt-path"]),
        (nemo_rl_megatron_step, ["holds in policy/weights/iter_0000000", "convert_megatron_to_hf.py", "--megatron-ckpt-path"]),
        (nemo_rl_converted, ["its weights as pickles (pytorch_model.bin), which are not read", "save_pretrained('SAFE')"]),
        (lambda *its: nemo_rl_consolidated(*its).parents[3], ["holds the model in policy/weights/model/consolidated; give '"]),
    ],
    ids=["step", "actor", "huggingface", "above", "merged", "adapter", "openrlhf lora", "deepspeed", "dcp", "megatron", "pickle", "consolidated"],
)  # fmt: skip
def test_of_any_other_folder_it_is_told_what_it_is_and_what_makes_a_model_of_it(
    write: Writer, words: list[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    folder = write(tmp_path / "theirs", model, tokenizer)
    with pytest.raises(InputError) as caught:
        check_model(spec_of(folder))
    said = str(caught.value)
    assert said.startswith(f"`model.path` is {str(folder)!r}, which ") and all(part in said for part in words), said
    with pytest.raises(InputError, match="`teacher` is "):
        check_teacher(spec_of(tmp_path / "base"), str(folder))


def test_the_command_that_is_told_makes_a_start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError) as caught:
        check_model(spec_of(nemo_rl_converted(tmp_path / "theirs", model, tokenizer)))
    monkeypatch.chdir(tmp_path)
    exec(str(caught.value).split('python -c "')[1].split('")')[0], {})
    check_model(spec_of(tmp_path / "SAFE"))
    with SafetensorsReader(tmp_path / "base") as base, SafetensorsReader(tmp_path / "SAFE") as read:
        assert torch.equal(read.get(CHANGED), base.get(CHANGED))


@pytest.mark.parametrize("write", [verl_lora_merged, openrlhf_lora])
def test_the_lines_that_are_told_for_adapters_are_a_start(
    write: Writer, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """As the spec's `model` block, and for fields without one as the folder that `nrl model merge` writes."""
    theirs = write(tmp_path / "their model's", model, tokenizer)
    with pytest.raises(InputError) as caught:
        check_model(spec_of(theirs))
    told = yaml.safe_load("\n".join(line for line in str(caught.value).splitlines() if line.startswith("  ")))
    raw = spec_of(theirs).model_dump(mode="json")
    check_model(ExperimentSpec.model_validate({**raw, "model": {**raw["model"], **told}}))
    with pytest.raises(InputError, match="`teacher` is ") as caught:
        check_teacher(spec_of(tmp_path / "base"), str(theirs))
    command = shlex.split(str(caught.value).split("(`")[1].split("`)")[0])
    assert command[0] == "nrl" and command[-1] == "MERGED"
    app([*command[1:-1], str(tmp_path / "MERGED")], standalone_mode=False)
    check_teacher(spec_of(tmp_path / "base"), str(tmp_path / "MERGED"))
    with (
        MergedReader(Path(told["path"]), Path(told["adapter"])) as merged,
        SafetensorsReader(tmp_path / "MERGED") as read,
    ):
        assert all(torch.equal(read.get(name), merged.get(name)) for name in merged.keys())
        with SafetensorsReader(tmp_path / "base") as base:
            assert not torch.equal(read.get(CHANGED), base.get(CHANGED))
