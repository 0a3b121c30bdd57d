"""Bad input is told with field, value and fix before anything starts: no Ray, no folder, no process."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemo_rl_like.artifacts.errors import InputError, NrlError, OutputFolderError
from nemo_rl_like.checkpoint.layout import ModelIdentity
from nemo_rl_like.checkpoint.shards import section_writer
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.pipeline.runner import run_pipeline
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.stages.preflight import prompts_are_known_early
from tests.stages.killing import finish, write_spec
from tests.tiny_folders import save_llama

CHARACTERS = "0123456789+="
EXPERTS = ("model.init.family=qwen3_moe", "model.init.experts=4")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever starts Ray fails the test."""

    def refuse(*_: object) -> RaySession:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(RaySession, "start", refuse)


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with weights, tokenizer and chat template."""
    tokenizer = character_tokenizer(CHARACTERS)
    folder = save_llama(tmp_path_factory.mktemp("model"), len(tokenizer), positions=32)
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture
def model(whole_model: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(whole_model, tmp_path / "model"))


def refusal(tmp_path: Path, *overrides: str, start: str = "new") -> NrlError:
    """The error of a run of the tiny spec with these overrides; asserts that nothing was made."""
    output = tmp_path / "out"
    before = sorted(output.rglob("*")) if output.is_dir() else None
    with pytest.raises(NrlError) as caught:
        run_pipeline(load_spec(write_spec(tmp_path / "spec", output), overrides), start=start)  # type: ignore[arg-type]
    assert (sorted(output.rglob("*")) if output.is_dir() else None) == before
    assert caught.value.exit_code == 2
    return caught.value


def of_folder(model: Path) -> tuple[str, ...]:
    """Overrides that take the model from a folder."""
    return (f"model.path={model}", "model.init=null", "model.tokenizer=null")


def test_a_whole_model_and_a_good_spec_reach_the_start_of_ray(tmp_path: Path, model: Path) -> None:
    for overrides in ((), of_folder(model)):
        spec = load_spec(write_spec(tmp_path / "spec", tmp_path / f"out{len(overrides)}"), overrides)
        with pytest.raises(AssertionError, match="Ray was started"):
            run_pipeline(spec)


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _no_folder(model: Path) -> None:
    shutil.rmtree(model)


def _truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _garbage(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"<html>not found</html>")


def _other_shapes(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))


def _more_layers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


def _no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def _no_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def _larger_tokenizer(model: Path) -> None:
    character_tokenizer(CHARACTERS + "abcdef").save_pretrained(str(model))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_no_folder, ("model.path", "is not a folder", "nrl model fetch")),
        (_no_weights, ("model.safetensors",)),
        (_truncated, ("model.safetensors", "not a whole safetensors file", "copy it again")),
        (_garbage, ("model.safetensors", "not a whole safetensors file")),
        (_other_shapes, ("shape", "config.json asks for")),
        (_more_layers, ("missing keys", "model.layers.2.")),
        (_no_template, ("chat template",)),
        (_no_tokenizer, ("tokenizer",)),
        (_larger_tokenizer, ("vocab_size", "tokenizer has 22 tokens")),
    ],
)
def test_a_damaged_model_folder_is_refused(
    tmp_path: Path, model: Path, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    damage(model)
    error = refusal(tmp_path, *of_folder(model))
    assert isinstance(error, InputError)
    for word in words:
        assert word in str(error), str(error)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("stages.0.samples_per_prompt=1",), ("samples_per_prompt", "grpo", "at least 2")),
        (("policy.layout.tp=4", "cluster.devices=4"), ("layout.tp is 4", "heads", "use tp in [1, 2]")),
        (("policy.layout.pp=3", "cluster.devices=3"), ("layout.pp is 3", "2 layers", "use pp in [1, 2]")),
        (("policy.layout.dp=64", "cluster.devices=2"), ("64 ranks", "2 cpu devices", "dp * pp * cp * tp at most 2")),
        (("environment={name: arithmetics}",), ("'arithmetics'", "did you mean 'arithmetic'")),
        (("environment={name: arithmetic, config: {digit: 1}}",), ("digit", "did you mean `digits`")),
        (("environment.reward=no_such.py:reward_func",), ("no_such.py",)),
        (("environment.prompts=no_such.jsonl",), ("no_such.jsonl",)),
        (("stages.0.optimizer.warmup_steps=99",), ("optimizer.warmup_steps", "99", "at most 16")),
        (("stages.0.updates_per_batch=5",), ("updates_per_batch", "5", "4 groups")),
        (("engine.kind=vllm",), ("stage rl", "`model.init`", "vLLM", "engine.kind: embedded")),
        (("engine.max_context=4",), ("task row-", "5 tokens", "context is 4", "engine.max_context")),
        (("secrets={key: {env: NRL_SURELY_NOT_SET}}",), ("NRL_SURELY_NOT_SET", "export it")),
        (("policy.layout.dp=2", "policy.layout.ep=2", "cluster.devices=2"), ("has `ep` or `etp`", "no experts")),
        (("policy.layout.ep=2",), ("`ep` * `etp` is 2 * 1", "`dp` * `cp` * `tp` (1 * 1 * 1)", "raise `dp`")),
        (("policy.router.z_loss=0.1",), ("`policy.router` has losses", "no experts")),
        (("policy.layout.vpp=2",), ("`vpp` gives", "`pp` is 1")),
        (("policy.layout={pp: 2, vpp: 2}", "cluster.devices=2"), ("layout.vpp is 2", "2 layers", "use vpp in [1]")),
        (
            (*EXPERTS, "policy.router.bias_update_rate=0.001"),
            ("`policy.router.bias_update_rate` is 0.001", "qwen3_moe model's experts have no bias", "balance_loss"),
        ),
        (
            (*EXPERTS, "policy.router.bias_update_rate=0.001", "policy.lora={targets: [q_proj]}"),
            ("`router.bias_update_rate` moves biases of the base model", "`lora`", "leave one of the two out"),
        ),
        (
            (*EXPERTS, "policy.router.replay=first_pass", "stages.0.updates_per_batch=1"),
            (
                "`policy.router.replay` is first_pass",
                "one update a step without a log-prob pass",
                "recompute_proximal: always",
            ),
        ),
        (
            (*EXPERTS, "policy.router.replay=engine", "engine.kind=vllm"),
            ("`policy.router.replay` is engine", "`engine.kind` is vllm", "Triton", "`replay: first_pass`"),
        ),
        (("policy.recompute={kind: selective, layers: 2}",), ("`layers` goes with `kind: full`",)),
        (("model.init.family=mixtral",), ("needs `experts`",)),
        (("model.init.experts=4",), ("has no `experts`",)),
        (
            (*EXPERTS, "policy.lora={rank: 4, dropout: 0.1}"),
            ("policy.lora.dropout is 0.1", "gate_proj, up_proj, down_proj", "in experts of a qwen3_moe model"),
        ),
        (
            ("policy.lora={base: {kind: nf4}}", "model.init.intermediate_size=96"),
            (
                "policy.lora.base is nf4",
                "96 inputs of model.layers.0.mlp.down_proj.weight",
                "leave policy.lora.base out",
            ),
        ),
        (
            ("policy.adapter={kind: bottleneck, reduction: 7}",),
            ("policy.adapter.reduction is 7", "hidden_size (64)", "set `width`"),
        ),
        (
            (*EXPERTS, "policy.layout.dp=2", "policy.layout.ep=2", "cluster.devices=2"),
            ("`engine.kind: embedded` decodes on each data-parallel rank by itself", "vllm"),
        ),
        (("engine.tensor_parallel=2",), ("`engine.tensor_parallel` is 2", "only vLLM", "`policy.layout.tp`")),
        (
            ("policy.offload={optimizer: true}", "stages.0.optimizer={kind: muon}"),
            ("`policy.offload.optimizer`", "`optimizer.kind` is muon", "leave one of them out"),
        ),
        (
            ("policy.offload={frozen: true}", "stages.0.algorithm={preset: nash_md}"),
            ("`opponent`", "`policy.offload.frozen`", "leave one of them out"),
        ),
        (("policy.fp8={}",), ("`policy.fp8`", "`model.dtype: bfloat16`", "float32")),
        (("policy.fp8={recipe: tensorwise, margin: 1}",), ("`margin` goes with `recipe: delayed`",)),
        (
            ("policy.fp8={recipe: delayed, last_bf16_layers: 1}",),
            ("`recipe: delayed` scales all layers", "`last_bf16_layers`"),
        ),
        (("policy.fp8={recipe: mxfp8, parameters: true}",), ("`parameters` is for `recipe: tensorwise`", "mxfp8")),
        (
            ("policy.fp8={parameters: true}", "model.dtype=bfloat16", "policy.lora={}"),
            ("`policy.fp8.parameters`", "`policy.lora`", "leave one of them out"),
        ),
        (
            ("policy.fp8={parameters: true}", "model.dtype=bfloat16", "policy.offload={frozen: true}"),
            ("`policy.fp8.parameters`", "`policy.offload`", "leave one of them out"),
        ),
        (("engine.quantization=fp8_per_tensor",), ("`engine.quantization`", "`engine.kind` is embedded", "vllm")),
        (
            ("engine={kind: vllm, quantization: fp8_per_block}",),
            ("`engine.quantization` is fp8_per_block", "float32", "`engine.dtype: bfloat16`"),
        ),
        (
            ("engine={kind: vllm, quantization: fp8_per_tensor, dtype: bfloat16}",),
            ("`engine.quantization` is fp8_per_tensor", "needs an NVIDIA GPU", "leave it out"),
        ),
        (("policy.fp8={}", "model.dtype=bfloat16"), ("`policy.fp8`", "NVIDIA GPU", "leave it out")),
    ],
)
def test_a_spec_that_cannot_run_is_refused(tmp_path: Path, overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    error = refusal(tmp_path, *overrides)
    for word in words:
        assert word in str(error), str(error)


def test_an_engine_that_would_take_other_factors_of_longrope_than_training_is_refused(
    tmp_path: Path, whole_model: Path
) -> None:
    model = Path(shutil.copytree(whole_model, tmp_path / "model"))
    raw = json.loads((model / "config.json").read_text())
    pairs = raw["head_dim"] // 2
    rope = {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    phi = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "rope_parameters": None, "rope_scaling": rope}
    phi |= {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps({**raw, **phi}))
    error = refusal(tmp_path, *of_folder(model), "engine={kind: vllm, max_context: 16}")
    for word in ("`engine.max_context` is 16", "short factors", "`max_position_embeddings` is 64", "above 16"):
        assert word in str(error)


def test_one_long_prompt_among_many_is_named(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [[{"role": "user", "content": "1" * (40 if i == 7 else 3) + str(i)}] for i in range(20)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fractions = "environment.config={validation_fraction: 0.0, test_fraction: 0.0}"
    error = refusal(tmp_path, f"environment.prompts={prompts}", fractions)
    assert "task row-8: the prompt has" in str(error) and "max_positions" in str(error)


@pytest.mark.parametrize(("name", "known"), [("arithmetic", True), ("calculator", False)])
def test_only_prompts_that_a_running_environment_tells_wait_for_the_run(tmp_path: Path, name: str, known: bool) -> None:
    spec = load_spec(write_spec(tmp_path / "spec", tmp_path / "out"), (f"environment={{name: {name}}}",))
    assert prompts_are_known_early(spec) == known


def test_an_empty_file_of_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    error = refusal(tmp_path, f"environment.prompts={tmp_path / 'empty.jsonl'}")
    assert isinstance(error, InputError) and "empty.jsonl" in str(error)


def test_an_empty_held_out_split_is_refused(tmp_path: Path) -> None:
    stages = "stages=[{kind: evaluate, evaluation: {max_new_tokens: 4}}]"
    error = refusal(tmp_path, stages, "environment.config={test_fraction: 0.0}")
    assert "test split has no tasks" in str(error)


def test_empty_supervised_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    error = refusal(tmp_path, f"stages=[{{kind: sft, steps: 2, data: {{path: {tmp_path / 'empty.jsonl'}}}}}]")
    assert isinstance(error, InputError) and "empty.jsonl" in str(error)


def test_a_reward_file_with_a_mistake_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def reward_func(prompts, responses:\n")
    error = refusal(tmp_path, f"environment.reward={tmp_path / 'broken.py'}:reward_func")
    assert "broken.py" in str(error) and "SyntaxError" in str(error)


def test_vllm_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a))
    error = refusal(tmp_path, "engine.kind=vllm")
    assert "`engine.kind` is vllm, which is not installed" in str(error) and "embedded" in str(error)


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert "is a file" in str(refusal(tmp_path))
    assert (tmp_path / "out").read_text() == "mine"


def test_an_output_folder_of_others_files_is_refused_even_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    for start in ("new", "resume", "overwrite"):
        assert "thesis.tex" in str(refusal(tmp_path, start=start))


def test_an_output_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    error = refusal(tmp_path)
    assert isinstance(error, OutputFolderError) and "no permission to write" in str(error)


def test_resuming_with_another_model_is_refused_and_clears_nothing(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path / "spec", tmp_path / "out"))
    with pytest.raises(AssertionError, match="Ray was started"):
        run_pipeline(spec)
    kept = tmp_path / "out" / "rl" / "kept"
    kept.write_text("mine")
    error = refusal(tmp_path, "model.init.hidden_size=32", start="resume")
    assert isinstance(error, OutputFolderError)
    assert "model.init.hidden_size: 64 -> 32" in str(error) and "--overwrite" in str(error)
    assert kept.read_text() == "mine"


def test_a_checkpoint_of_another_model_in_the_stage_is_refused(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path / "spec", tmp_path / "out"))
    with pytest.raises(AssertionError, match="Ray was started"):
        run_pipeline(spec)
    with CheckpointWriter(tmp_path / "out" / "rl" / "checkpoints", 2, ModelIdentity("other", "a goat")) as writer:
        with section_writer(Path(writer.begin()), "weights") as shards:
            shards.add("w", torch.zeros(1))
        writer.commit({}, shards.files)
    with pytest.raises(InputError, match="belongs to another model: it holds a goat"):
        run_pipeline(spec, start="resume")


def test_bad_input_is_one_message_without_a_traceback_and_exit_code_2(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "spec", tmp_path / "out")
    assert finish(["run", str(spec), "engine.max_context=4", "environment.processes=2"], tmp_path / "log") == 2
    told = (tmp_path / "log").read_text()
    assert "error: " in told and "task row-" in told and "Traceback" not in told
    assert not (tmp_path / "out").exists()
