"""A bundle is whole, readable, described by its manifest and card, and made of the checkpoint's own bytes."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from nemo_rl_like.artifacts.errors import InputError, OutputFolderError, SpecError
from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.cli.app import app
from nemo_rl_like.cli.commands.checkpoint import export_stage
from nemo_rl_like.export import bundle
from nemo_rl_like.export.bundle import ExportSource, How, write_bundles
from nemo_rl_like.export.check import check_bundle
from nemo_rl_like.export.hf import weight_differences
from nemo_rl_like.export.problems import BundleError, Problem
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.export import (
    ExportStageSpec,
    GgufTarget,
    HfTarget,
    NimLoraTarget,
    NimTarget,
    QuantizedTarget,
    TritonVllmTarget,
)
from nemo_rl_like.spec.loader import load_spec, spec_hash
from nemo_rl_like.stages.api import export_checkpoint
from nemo_rl_like.stages.export import ExportStage
from tests.export.conftest import KINDS
from tests.export.made import make_run, seal

WEIGHTS = How(parity="weights")


def checkpoint_of(run: Path) -> Path:
    return run / "sft" / "checkpoints" / "step_3"


def test_the_manifest_names_every_file_and_what_it_was_made_of(bundles: Path, run_folder: Path) -> None:
    for kind in KINDS:
        raw = json.loads((bundles / kind / "manifest.json").read_text())
        files = {p.relative_to(bundles / kind).as_posix(): p for p in (bundles / kind).rglob("*") if p.is_file()}
        del files["manifest.json"]
        assert {entry["path"]: entry["sha256"] for entry in raw["files"]} == {
            n: sha256_file(p) for n, p in files.items()
        }
        assert raw["kind"] == kind and raw["parity"]["level"] == "weights"
        assert raw["spec_sha256"] == spec_hash(load_spec(run_folder / "spec.yaml"))
        assert raw["source"]["checkpoint"] == "sft/checkpoints/step_3" and raw["source"]["step"] == 3
        assert raw["source"]["manifest_sha256"] == sha256_file(checkpoint_of(run_folder) / "manifest.json")


def test_everyone_may_read_everything(bundles: Path) -> None:
    for path in bundles.rglob("*"):
        wanted = 0o755 if path.is_dir() or path.suffix == ".sh" else 0o644
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_bundles_share_their_weights_on_the_disk(bundles: Path) -> None:
    paths = ("hf", "triton-vllm/weights", "nim/model", "triton-python/model_repository/model/1/weights")
    assert len({(bundles / path / "model.safetensors").stat().st_ino for path in paths}) == 1


def test_two_exports_of_one_checkpoint_are_equal(bundles: Path, run_folder: Path, tmp_path: Path) -> None:
    stage = ExportStageSpec.model_validate({"targets": [{"kind": "nim"}], "parity": "weights"})
    (again,) = export_checkpoint(run_folder, tmp_path / "again", stage)
    assert (again / "manifest.json").read_bytes() == (bundles / "nim" / "manifest.json").read_bytes()


def test_the_card_says_base_method_data_metrics_and_licence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = make_run(run)
    (checkpoint / "weights" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    seal(checkpoint)
    report = run / "evaluate" / "report" / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"results": {"sft": {"metrics": {"accuracy": 0.75}}, "rl": {"metrics": {"x": 1.0}}}}))
    (out,) = export_checkpoint(run, tmp_path / "out", ExportStageSpec(parity="weights"))
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    for words in (
        f"`{tmp_path / 'base'}`",
        "`sft`: sft, 3 steps",
        "environment: `arithmetic`",
        "accuracy (evaluate): 0.7500",
    ):
        assert words in text
    assert "x (evaluate)" not in text and "No more was proved: asked for" in text
    (mine,) = export_checkpoint(run, tmp_path / "mine", ExportStageSpec(parity="weights", license="mit"))
    assert yaml.safe_load((mine / "README.md").read_text().split("---\n")[1])["license"] == "mit"


def test_pickles_and_trainers_files_of_the_base_do_not_travel(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run")
    for name in ("training_args.bin", "scheduler.pt", "trainer_state.json", "manifest.json", "notes.md"):
        (checkpoint / "weights" / name).write_text("{}")
    (checkpoint / "weights" / "LICENSE").write_text("terms")
    seal(checkpoint)
    write_bundles(ExportSource(checkpoint), [(HfTarget(), tmp_path / "out")], WEIGHTS)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "LICENSE" in names and not names & {"training_args.bin", "scheduler.pt", "trainer_state.json", "notes.md"}


def test_a_bundle_that_fails_its_own_check_never_gets_its_name(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "layout_problems", lambda *_: [Problem("config.json", "is wrong")])
    with pytest.raises(BundleError, match=r"config\.json: is wrong"):
        write_bundles(ExportSource(checkpoint_of(run_folder)), [(NimTarget(), tmp_path / "out")], WEIGHTS)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_place_is_refused_and_an_empty_one_is_used(run_folder: Path, tmp_path: Path) -> None:
    source = ExportSource(checkpoint_of(run_folder))
    (tmp_path / "out").mkdir()
    write_bundles(source, [(HfTarget(), tmp_path / "out")], WEIGHTS)
    with pytest.raises(OutputFolderError, match="is not an empty folder"):
        write_bundles(source, [(HfTarget(), tmp_path / "out")], WEIGHTS)


def test_a_changed_byte_is_found(bundles: Path, run_folder: Path, tmp_path: Path) -> None:
    weights = checkpoint_of(run_folder) / "weights"
    copy = tmp_path / "copy"
    shutil.copytree(bundles / "hf", copy)
    assert weight_differences(weights, copy) == []
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    (problem,) = weight_differences(weights, copy)
    assert problem.message == "has other bytes than the checkpoint's"


def test_peft_over_the_base_is_the_merged_export(bundles: Path, run_folder: Path) -> None:
    rows = torch.arange(4, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(run_folder.parent / "base", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(bundles / "hf", dtype=torch.float32)
    with torch.inference_mode():
        before, wanted = base(rows).logits, merged(rows).logits
        adapted = PeftModel.from_pretrained(base, bundles / "hf-lora")(rows).logits
    assert float((adapted - wanted).abs().max()) < 1e-4 < 1e-2 < float((before - wanted).abs().max())
    tree = bundles / "nim-lora" / "adapters" / "adapter"
    theirs = load_file(bundles / "hf-lora" / "adapter_model.safetensors")
    assert all(torch.equal(t, theirs[name]) for name, t in load_file(tree / "adapter_model.safetensors").items())
    assert sorted(p.name for p in tree.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_transformers_reads_the_gguf_file_as_the_same_model(run_folder: Path, tmp_path: Path, dtype: str) -> None:
    """float32: the same logits to rounding; else those of the folder's matrices rounded to the type."""
    weights = checkpoint_of(run_folder) / "weights"
    target = GgufTarget.model_validate({"dtype": dtype})
    write_bundles(ExportSource(checkpoint_of(run_folder)), [(target, tmp_path / "out")], WEIGHTS)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    rows = torch.arange(4, 40)[None]
    with torch.inference_mode():
        assert float((read(rows).logits - model(rows).logits).abs().max()) < 1e-5
    mine, theirs = (
        AutoTokenizer.from_pretrained(weights),
        AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf"),
    )
    for text in ("two and three are five, 12 é", "  one\n\ntwo"):
        assert theirs(text, add_special_tokens=False).input_ids == mine(text, add_special_tokens=False).input_ids
    assert (theirs.eos_token, theirs.pad_token, theirs.chat_template) == (
        mine.eos_token,
        mine.pad_token,
        mine.chat_template,
    )


def test_what_cannot_be_made_is_refused_before_anything_is_written(run_folder: Path, tmp_path: Path) -> None:
    plain = make_run(tmp_path / "run")
    out = tmp_path / "out"
    adapted = TritonVllmTarget(adapters={"x": str(tmp_path / "none")})
    for target, words in ((NimLoraTarget(), "has no adapters"), (adapted, r"target triton-vllm: `adapters\.x`")):
        with pytest.raises(InputError, match=words):
            write_bundles(ExportSource(plain), [(HfTarget(), tmp_path / "hf"), (target, out)], WEIGHTS)
    assert not (tmp_path / "hf").exists() and not out.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "the family mistral has no GGUF writer"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}, "rope scaling of type llama3"),
        ({"use_sliding_window": True}, "layers with a window"),
    ],
)  # fmt: skip
def test_gguf_refuses_what_it_cannot_say(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    checkpoint = make_run(tmp_path / "run")
    file = checkpoint / "weights" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    seal(checkpoint)
    with pytest.raises(InputError, match=words):
        write_bundles(ExportSource(checkpoint), [(GgufTarget(), tmp_path / "out")], WEIGHTS)
    assert not (tmp_path / "out").exists()


def test_what_a_target_lacks_is_told_before_the_pipeline_starts(tmp_path: Path) -> None:
    targets: list[dict[str, object]] = [
        {"kind": "triton-vllm", "max_model_len": 64, "adapters": {"x": str(tmp_path / "none")}},
        {"kind": "triton-trtllm", "max_seq_len": 64},
        {"kind": "nim", "max_model_len": 32},
        {"kind": "hf-quantized", "calibration": "none.txt"},
        {"kind": "gguf"},
    ]
    model = {"init": {"family": "mistral", "max_positions": 32}, "tokenizer": {"characters": "0123456789+="}}
    stage = ExportStageSpec.model_validate({"targets": targets})
    spec = ExperimentSpec.model_validate({"output": "x", "model": model, "stages": [stage.model_dump()]})
    problems = ExportStage(stage, spec).preflight()
    for words in (
        "target triton-vllm: `adapters.x`",
        "target triton-vllm: `max_model_len` is 64, and the model's context is 32 tokens",
        "target triton-trtllm: `max_seq_len` is 64",
        "which is not installed",
        "`calibration` is 'none.txt', which is no file",
        "the family mistral has no GGUF writer",
    ):
        assert any(words in problem for problem in problems), (words, problems)
    assert not any("target nim" in problem for problem in problems)
    assert ExportStage(ExportStageSpec(), spec).preflight() == []


def test_quantising_without_modelopt_says_what_to_install(run_folder: Path, tmp_path: Path) -> None:
    target = QuantizedTarget(calibration=str(tmp_path / "text.txt"))
    with pytest.raises(InputError, match="needs NVIDIA ModelOpt, which is not installed; pip install nvidia-modelopt"):
        write_bundles(ExportSource(checkpoint_of(run_folder)), [(target, tmp_path / "out")], WEIGHTS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"targets": [{"kind": "hf"}, {"kind": "hf"}]}, "`targets` has hf more than once"),
        ({"adapter": True, "targets": [{"kind": "hf"}]}, "hf-lora alone"),
        ({"targets": [{"kind": "triton-vlm"}]}, "does not match any of the expected tags"),
        ({"targets": [{"kind": "triton-vllm", "max_len": 3}]}, "Extra inputs are not permitted"),
        ({"targets": [{"kind": "triton-vllm", "gpu_memory_utilization": 0}]}, "greater than 0"),
        ({"targets": [{"kind": "triton-vllm", "mounted_at": "bundle"}]}, "should match pattern"),
        ({"targets": [{"kind": "triton-vllm", "model_name": "a/b"}]}, "should match pattern"),
        ({"targets": [{"kind": "triton-vllm", "gpu_ids": [1, 1], "tensor_parallel_size": 2}]}, "name as many different GPUs"),
        ({"targets": [{"kind": "nim-lora", "adapter_name": "a", "adapters": {"a": "x"}}]}, "which is `adapter_name`"),
        ({"targets": [{"kind": "nim", "version": "3.x"}]}, "Input should be '1.x' or '2.x'"),
    ],
)  # fmt: skip
def test_a_wrong_target_is_refused_when_the_spec_is_read(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ExportStageSpec.model_validate(values)


def test_adapter_targets_need_adapters_in_the_spec() -> None:
    values = {"output": "x", "model": {"path": "x"}, "stages": [{"kind": "export", "targets": [{"kind": "nim-lora"}]}]}
    with pytest.raises(ValidationError, match="has a target of adapters, but nothing trains adapters"):
        ExperimentSpec.model_validate(values)


def test_nim_1_and_2_read_other_variables(run_folder: Path, tmp_path: Path) -> None:
    target = NimTarget(version="1.x", model_name="1_000", max_model_len=64)
    write_bundles(ExportSource(checkpoint_of(run_folder)), [(target, tmp_path / "out")], WEIGHTS)
    lines = (tmp_path / "out" / "nim.env").read_text().split()
    assert {"NIM_FT_MODEL=/bundle/model", "NIM_CUSTOM_MODEL_NAME=1_000", "NIM_MAX_MODEL_LEN=64"} <= set(lines)
    named = yaml.safe_load((tmp_path / "out" / "evaluator.yaml").read_text())["target"]["api_endpoint"]["model_id"]
    rails = yaml.safe_load((tmp_path / "out" / "guardrails" / "config.yml").read_text())
    assert named == rails["models"][0]["model"] == "1_000"
    assert check_bundle(tmp_path / "out").problems == ()


@pytest.mark.parametrize("name", ["sums", "123"])
def test_evaluator_and_guardrails_ask_for_the_served_model_by_its_name(
    name: str, run_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_bundles(ExportSource(checkpoint_of(run_folder)), [(NimTarget(model_name=name), out)], WEIGHTS)
    evaluator = yaml.safe_load((out / "evaluator.yaml").read_text())
    assert set(evaluator) == {"target", "config"} and set(evaluator["config"]) == {"type", "output_dir", "params"}
    endpoint = evaluator["target"]["api_endpoint"]
    assert (endpoint["model_id"], endpoint["type"]) == (name, "chat") and endpoint["url"].endswith(
        "/v1/chat/completions"
    )
    guardrails = yaml.safe_load((out / "guardrails" / "config.yml").read_text())
    (model,) = guardrails["models"]
    assert (model["type"], model["engine"], model["model"]) == ("main", "nim", name)
    assert endpoint["url"].startswith(model["parameters"]["base_url"])
    flows = [flow.replace(" ", "_") for flow in guardrails["rails"]["input"]["flows"]]
    assert [prompt["task"] for prompt in guardrails["prompts"]] == flows
    assert all("{{ user_input }}" in prompt["content"] for prompt in guardrails["prompts"])


def test_the_command_line_takes_targets_and_their_options(run_folder: Path, tmp_path: Path) -> None:
    given = [
        "export",
        str(run_folder),
        str(tmp_path / "out"),
        "--to",
        "triton-vllm",
        "--parity",
        "weights",
        "max_model_len=64",
    ]
    done = CliRunner().invoke(app, [*given, "adapters={}"])
    assert done.exit_code == 0, done.output
    engine = json.loads((tmp_path / "out" / "model_repository" / "model" / "1" / "model.json").read_text())
    assert engine["max_model_len"] == 64 and engine["model"] == "/bundle/weights"
    common = {"adapter": False, "parity": "auto", "shard_gib": 4.0, "license_name": None}
    for kinds, options, words in (
        (["hf", "nim"], ["version=1.x"], "give one --to"),
        (["nim"], ["version"], "'version' is not of the form KEY=VALUE"),
        (["nim"], ["versoin=1.x"], r"`versoin=1.x`: targets.nim.versoin: unknown key; did you mean `version`\?"),
        (["nim"], ["version=3.x"], r"`version=3.x`: targets.nim.version: is '3.x': must be '1.x' or '2.x'"),
        (["nmi"], [], r"--to nmi: .* unknown kind 'nmi'; did you mean `nim`\?\n.*allowed: one of gguf, hf"),
    ):
        with pytest.raises(SpecError, match=words):
            export_stage(kinds, options, **common)
