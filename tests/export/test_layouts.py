"""Every bundle passes its validator, and each way to break one is named with its file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cli.app import app
from nemo_rl_like.export.check import check_bundle
from nemo_rl_like.model.hf_io import write_weights
from tests.export.conftest import KINDS

Breaks = Callable[[Path], object]
REPOSITORY = "model_repository/model"


def edited(name: str, **changes: Any) -> Breaks:
    """Changes entries of a JSON file; None removes one."""

    def apply(folder: Path) -> None:
        raw = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))

    return apply


def replaced(name: str, old: str, new: str) -> Breaks:
    def apply(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return apply


def written(name: str, text: str | bytes) -> Breaks:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def removed(name: str) -> Breaks:
    return lambda folder: (folder / name).unlink()


def linked(name: str, to: str) -> Breaks:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return apply


def cut(name: str) -> Breaks:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def without_shard(folder: Path) -> None:
    shard(folder)
    sorted(folder.glob("model-*.safetensors"))[0].unlink()


def wrong_index(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["nothing"] = raw["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(raw))


def unlisted_tensor(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    del raw["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(raw))


def second_set(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    shard(folder)
    save(weights, folder / "model.safetensors")


def shard(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_weights(folder, iter(weights.items()), 80_000)


def loose_shard(folder: Path) -> None:
    save({"x": torch.zeros(1)}, folder / "more.safetensors")


def unreadable(folder: Path) -> None:
    (folder / "config.json").chmod(0o600)


def closed(folder: Path) -> None:
    (folder / "model_repository").chmod(0o750)


def lone_half(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    lost = next(name for name in tensors if name.endswith("lora_B.weight"))
    save({name: t for name, t in tensors.items() if name != lost}, folder / "adapter_model.safetensors")


def save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)


MODEL_JSON, CONFIG = f"{REPOSITORY}/1/model.json", f"{REPOSITORY}/config.pbtxt"
YAML = "model_repository/tensorrt_llm/1/model.yaml"
BROKEN: list[tuple[str, Breaks, str, str]] = [
    ("hf", written("config.json", "{"), "config.json", "is not valid JSON"),
    ("hf", written("config.json", "[]"), "config.json", "holds a list"),
    ("hf", edited("config.json", model_type=None), "config.json", "no `model_type`"),
    ("hf", edited("config.json", architectures=[]), "config.json", "no `architectures`"),
    ("hf", edited("config.json", vocab_size=100), "tokenizer.json", "token id 287, and config.json's `vocab_size` is 100"),
    ("hf", removed("tokenizer.json"), "tokenizer.json", "is missing"),
    ("hf", removed("tokenizer_config.json"), "tokenizer_config.json", "is missing"),
    ("hf", removed("generation_config.json"), "generation_config.json", "is missing"),
    ("hf", edited("generation_config.json", eos_token_id=None), "generation_config.json", "answers would not end"),
    ("hf", edited("generation_config.json", eos_token_id=[0, 288]), "generation_config.json", "`eos_token_id` 288"),
    ("hf", removed("model.safetensors"), ".", "has neither model.safetensors"),
    ("hf", cut("model.safetensors"), "model.safetensors", "its tensors end at byte"),
    ("hf", without_shard, "model.safetensors.index.json", "does not exist"),
    ("hf", wrong_index, "model.safetensors.index.json", "lacks the tensor"),
    ("hf", unlisted_tensor, "model.safetensors.index.json", "does not list the tensor 'model.norm.weight'"),
    ("hf", second_set, "model.safetensors", "two sets of weights"),
    ("hf", loose_shard, "more.safetensors", "is not in model.safetensors"),
    ("hf", linked("config.json", "/etc/hostname"), "config.json", "is a link to /etc/hostname, outside the folder"),
    ("hf", linked("config.json", "gone.json"), "config.json", "which does not exist"),
    ("hf", written("training_args.bin", pickle.dumps({})), "training_args.bin", "a pickle or the like"),
    ("hf", unreadable, "config.json", "has permissions 0600"),
    ("hf-lora", edited("adapter_config.json", peft_type="IA3"), "adapter_config.json", "`peft_type` 'IA3'"),
    ("hf-lora", edited("adapter_config.json", r=8), "adapter_model.safetensors", "has rank 4, the config's `r` is 8"),
    ("hf-lora", lone_half, "adapter_model.safetensors", "has no lora_B beside it"),
    ("hf-lora", removed("adapter_model.safetensors"), "adapter_model.safetensors", "is missing"),
    ("hf-lora", written("adapter_model.bin", pickle.dumps({})), "adapter_model.bin", "a pickle or the like"),
    ("triton-python", closed, "model_repository", "has permissions 0750"),
    ("triton-python", removed(f"{REPOSITORY}/1/model.py"), f"{REPOSITORY}/1/model.py", "is missing"),
    ("triton-python", replaced(CONFIG, '"input_ids"', '"ids"'), CONFIG, "has no input 'input_ids'"),
    ("triton-python", replaced(CONFIG, '"THREADS"', '"X"'), CONFIG, "has no parameter THREADS"),
    ("triton-python", removed(f"{REPOSITORY}/1/weights/tokenizer.json"), f"{REPOSITORY}/1/weights/tokenizer.json", "is missing"),
    ("triton-vllm", edited(MODEL_JSON, disable_log_requests=True), MODEL_JSON, "'disable_log_requests', which vLLM's"),
    ("triton-vllm", edited(MODEL_JSON, max_model_length=64), MODEL_JSON, "did you mean `max_model_len`"),
    ("triton-vllm", edited(MODEL_JSON, max_model_len=4096), MODEL_JSON, "the model's context is 128"),
    ("triton-vllm", edited(MODEL_JSON, tensor_parallel_size="2"), MODEL_JSON, "`tensor_parallel_size` '2'"),
    ("triton-vllm", edited(MODEL_JSON, gpu_memory_utilization=1.5), MODEL_JSON, "`gpu_memory_utilization` 1.5"),
    ("triton-vllm", edited(MODEL_JSON, max_lora_rank=4), MODEL_JSON, "`max_lora_rank` 4"),
    ("triton-vllm", edited(MODEL_JSON, max_lora_rank=1), "adapters/sums", "has rank 4, `max_lora_rank` is 1"),
    ("triton-vllm", edited(MODEL_JSON, model="weights"), MODEL_JSON, "must be an absolute path that ends in /weights"),
    ("triton-vllm", written(MODEL_JSON, "{'model': 1}"), MODEL_JSON, "is not valid JSON"),
    ("triton-vllm", removed(MODEL_JSON), MODEL_JSON, "is missing"),
    ("triton-vllm", removed(f"{REPOSITORY}/1/multi_lora.json"), f"{REPOSITORY}/1/multi_lora.json", "is missing"),
    ("triton-vllm", edited(MODEL_JSON, enable_lora=None), f"{REPOSITORY}/1/multi_lora.json", "no `enable_lora: true`"),
    ("triton-vllm", removed("adapters/sums/adapter_config.json"), "adapters/sums/adapter_config.json", "is missing"),
    ("triton-vllm", replaced(CONFIG, "max_batch_size", "max_batch_sice"), CONFIG, "did you mean `max_batch_size`"),
    ("triton-vllm", replaced(CONFIG, "max_batch_size: 0", "max_batch_size: 8"), CONFIG, "`max_batch_size` 8, must be 0"),
    ("triton-vllm", replaced(CONFIG, "decoupled: true", "decoupled: false"), CONFIG, "decoupled: true"),
    ("triton-vllm", replaced(CONFIG, "KIND_MODEL", "KIND_GPU"), CONFIG, "of kind KIND_MODEL"),
    ("triton-vllm", replaced(CONFIG, '"vllm"', '"onnx"'), CONFIG, "`backend` 'onnx', must be 'vllm'"),
    ("triton-vllm", replaced(CONFIG, 'name: "model"', 'name: "other"'), CONFIG, "`name` 'other', must be 'model'"),
    ("triton-vllm", written(CONFIG, "name: {"), CONFIG, "cannot be read: line 1"),
    ("triton-vllm", removed("weights/tokenizer.json"), "weights/tokenizer.json", "is missing"),
    ("triton-trtllm", replaced(YAML, "pytorch", "tensorrt"), YAML, "engines are no longer built"),
    ("triton-trtllm", replaced(YAML, "max_batch_size: 0", "max_batch_size: 4"), YAML, "`max_batch_size: 0`"),
    ("triton-trtllm", replaced(YAML, "tensor_parallel_size", "tensor_paralel_size"), YAML, "`tensor_parallel_size`"),
    ("triton-trtllm", written(YAML, "model: ["), YAML, "cannot be read"),
    ("nim", removed("nim.env"), "nim.env", "is missing"),
    ("nim", replaced("nim.env", "NIM_MODEL_PATH", "NIM_MODEL_PAHT"), "nim.env", "NIM_MODEL_PAHT"),
    ("nim", written("nim.env", "NIM_FT_MODEL=/x/model\nNIM_MODEL_PATH=/x/model\n"), "nim.env", "must set one of"),
    ("nim", written("nim.env", "NIM_MODEL_PATH=/x/model\nNIM_CUSTOM_MODEL_NAME=x\n"), "nim.env", "NIM 2.x does not read"),
    ("nim", removed("model/special_tokens_map.json"), "model/special_tokens_map.json", "is missing"),
    ("nim", cut("model/model.safetensors"), "model/model.safetensors", "its tensors end at byte"),
    ("nim", replaced("evaluator.yaml", '"model"', "other"), "evaluator.yaml", "asks for the model 'other', and nim.env serves 'model'"),
    ("nim", replaced("guardrails/config.yml", '"model"', "1.0"), "guardrails/config.yml", "asks for the model 1.0"),
    ("nim", written("guardrails/config.yml", "models: []"), "guardrails/config.yml", "names no model at models.0.model"),
    ("nim", written("evaluator.yaml", "target: ["), "evaluator.yaml", "names no model at target.api_endpoint.model_id"),
    ("nim-lora", replaced("nim.env", "RANK=4", "RANK=2"), "adapters/adapter", "has rank 4, and NIM_MAX_LORA_RANK is '2'"),
    ("nim-lora", edited("adapters/adapter/adapter_config.json", peft_type="PROMPT_TUNING"), "adapters/adapter", "is no LoRA"),
    ("nim-lora", written("adapters/notes.txt", "x"), "adapters/notes.txt", "only adapters' folders may"),
    ("gguf", cut("model.gguf"), "model.gguf", "is no whole GGUF file"),
    ("gguf", written("model.gguf", b"GGML" + bytes(100)), "model.gguf", "is no whole GGUF file"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_bundle_is_valid_with_its_manifest_and_known_without(
    kind: str, bundles: Path, copy_of: Callable[[str], Path]
) -> None:
    report = check_bundle(bundles / kind)
    assert (report.kind, report.problems) == (kind, ()) and report.manifest is not None
    report = check_bundle(copy_of(kind))
    assert (report.kind, report.problems, report.manifest) == (kind, (), None)


@pytest.mark.parametrize(("kind", "breaks", "path", "words"), BROKEN, ids=[f"{b[0]}: {b[3][:30]}" for b in BROKEN])
def test_what_is_broken_is_named(
    kind: str, breaks: Breaks, path: str, words: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(kind)
    breaks(folder)
    problems = check_bundle(folder).problems
    assert any(problem.path == path and words in problem.message for problem in problems), [str(p) for p in problems]


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (removed("chat_template.jinja"), "is in the manifest but missing"),
        (written("more.json", "{}"), "is not in the manifest"),
        (replaced("generation_config.json", "eos_token_id", "eos_tokem_id"), "has other bytes than"),
        (replaced("generation_config.json", "eos_token_id", "eos_id"), "bytes, the manifest says"),
        (edited("manifest.json", format=2), "is no manifest of this version: `format`"),
        (edited("manifest.json", more=1), "`more`: Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_the_manifest_finds_what_the_layout_cannot(
    breaks: Breaks, words: str, bundles: Path, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("hf")
    (folder / "manifest.json").write_bytes((bundles / "hf" / "manifest.json").read_bytes())
    breaks(folder)
    assert any(words in problem.message for problem in check_bundle(folder).problems)


def test_a_bundle_at_another_place_than_it_says_is_refused(bundles: Path, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("triton-vllm")
    raw = json.loads((bundles / "triton-vllm" / "manifest.json").read_text())
    raw["options"]["mounted_at"] = "/elsewhere"
    (folder / "manifest.json").write_text(json.dumps(raw))
    words = "has `model` '/bundle/weights', and the bundle is meant to be at /elsewhere"
    assert any(words in problem.message for problem in check_bundle(folder).problems)


def test_a_quantised_folder_says_how_its_bytes_are_read(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("hf")
    written("hf_quant_config.json", '{"quantization": {"quant_algo": "FP9"}}')(folder)
    report = check_bundle(folder)
    assert report.kind == "hf-quantized"
    assert {(p.path, p.message[:27]) for p in report.problems} == {
        ("hf_quant_config.json", "has `quant_algo` 'FP9', mus"),
        ("config.json", "has no `quantization_config"),
    }
    edited("config.json", quantization_config={"quant_method": "modelopt"})(folder)
    written("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}')(folder)
    assert check_bundle(folder).problems == ()


def test_export_check_says_what_a_folder_is_and_exits_2_for_a_broken_one(
    bundles: Path, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    done = CliRunner().invoke(app, ["export", "check", str(bundles / "nim")])
    assert done.exit_code == 0 and done.stdout == f"{bundles / 'nim'}: nim: ok\n"
    folder = copy_of("hf")
    (folder / "tokenizer.json").unlink()
    done = CliRunner().invoke(app, ["export", "check", str(folder), "--json"])
    assert done.exit_code == 2
    found = json.loads(done.stdout)
    assert (found["ok"], found["kind"], found["manifest"]) == (False, "hf", False)
    assert [problem["path"] for problem in found["problems"]] == ["tokenizer.json"]
    with pytest.raises(InputError, match="is not a folder"):
        check_bundle(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is no bundle"):
        check_bundle(tmp_path)
