"""The `triton-vllm` bundle under a real tritonserver, with a double of the vLLM backend in front of real vLLM."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_like.export.check import check_bundle
from nemo_rl_like.export.parity_process import trainers
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.stages.api import export_checkpoint
from tests.export.made import make_run
from tests.export.test_layouts import edited, removed, replaced, shard
from tests.export.triton_server import triton
from tests.generation.vllm_adapter import SETTINGS

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(1500)]
HERE = Path(__file__).parent
DOUBLE = {"vllm": HERE / "vllm_backend_double.py"}
ENVIRONMENT = {**SETTINGS, "NRL_PYTHON": sys.executable, "NRL_VLLM_LINES": str(HERE / "vllm_lines.py")}
PROMPTS = ([5, 70, 200], [100, 101, 102, 103, 104, 105, 106], [287, 2, 40, 41])
TOKENS = 12
HOW = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
GENERATE, MODEL = "/v2/models/model/generate", "model_repository/model"
MODEL_JSON, MULTI_LORA, CONFIG = f"{MODEL}/1/model.json", f"{MODEL}/1/multi_lora.json", f"{MODEL}/config.pbtxt"


def greedy(weights: Path) -> list[tuple[int, ...]]:
    """What Megatron says after each prompt."""
    rows = [list(prompt) for prompt in PROMPTS]
    return trainers(weights, rows, rows, TOKENS)[2]


@pytest.fixture(scope="module")
def served(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the base with the run's adapters beside it, at the place that it names."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint = make_run(folder / "run")
    (adapter,) = export_checkpoint(run_folder, folder / "adapter", ExportStageSpec(adapter=True))
    target = {
        "kind": "triton-vllm",
        "mounted_at": str(folder / "bundle"),
        "adapters": {"sums": str(adapter)},
        "max_model_len": 64,
        "max_batch": 4,
        "dtype": "float32",
        "kv_cache_gib": 0.05,
        "enforce_eager": True,
    }
    stage = ExportStageSpec.model_validate({"targets": [target], "parity": "weights"})
    (bundle,) = export_checkpoint(checkpoint, folder / "bundle", stage)
    return bundle


def test_vllm_behind_triton_says_what_the_trainer_says_with_adapters_and_without(
    served: Path, run_folder: Path, tmp_path: Path
) -> None:
    assert check_bundle(served).problems == ()
    base = greedy(served / "weights")
    merged = greedy(run_folder / "sft" / "checkpoints" / "step_3" / "weights")
    assert base != merged
    with triton(served / "model_repository", tmp_path, DOUBLE, env=ENVIRONMENT, timeout_s=500) as server:
        for prompt, plain, adapted in zip(PROMPTS, base, merged, strict=True):
            for wanted, more in ((plain, {}), (adapted, {"lora_name": "sums"})):
                body = {"input_ids": prompt, "sampling_parameters": json.dumps({**HOW, **more})}
                assert tuple(server.post(GENERATE, body)["token_ids"]) == wanted
                parts = server.stream(f"{GENERATE}_stream", {**body, "stream": True})
                assert tuple(i for part in parts for i in ids_of(part)) == wanted and len(parts) > 1
        said = server.post(GENERATE, {"text_input": "two and", "sampling_parameters": json.dumps(HOW)})
        assert said["text_output"].startswith("two and")


def ids_of(part: dict[str, object]) -> list[int]:
    """A tensor of one value comes as that value."""
    found = part["token_ids"]
    return list(found) if isinstance(found, list) else [int(str(found))]


def without_shard(folder: Path) -> None:
    shard(folder / "weights")
    sorted((folder / "weights").glob("model-*.safetensors"))[0].unlink()


@pytest.mark.parametrize(
    ("breaks", "path", "says"),
    [
        (removed(MODEL_JSON), MODEL_JSON, "must be provided in"),
        (removed(MULTI_LORA), MULTI_LORA, "multi_lora.json"),
        (edited(MODEL_JSON, disable_log_requests=True), MODEL_JSON, "unexpected keyword argument 'disable_log_requests'"),
        (edited(MODEL_JSON, max_model_len=4096), MODEL_JSON, "max_model_len"),
        (removed("weights/tokenizer.json"), "weights/tokenizer.json", "okenizer"),
        (without_shard, "weights/model.safetensors.index.json", "model"),
        (replaced(CONFIG, "max_batch_size", "max_batch_sice"), CONFIG, "max_batch_sice"),
        (replaced(CONFIG, 'name: "model"', 'name: "other"'), CONFIG, "model name"),
    ],
    ids=["no model.json", "no multi_lora.json", "old key", "beyond the context", "no tokenizer", "no shard", "unknown field", "other name"],
)  # fmt: skip
def test_what_the_validator_refuses_the_server_does_not_load(
    served: Path, tmp_path: Path, breaks: Callable[[Path], object], path: str, says: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(served, folder)
    (folder / "manifest.json").unlink()
    for name in (MODEL_JSON, MULTI_LORA):
        (folder / name).write_text((folder / name).read_text().replace(str(served), str(folder)))
    assert check_bundle(folder).problems == ()
    breaks(folder)
    assert path in [problem.path for problem in check_bundle(folder).problems]
    with (
        pytest.raises(RuntimeError, match="tritonserver ended with exit code 1") as caught,
        triton(folder / "model_repository", tmp_path / "server", DOUBLE, env=ENVIRONMENT, timeout_s=300),
    ):
        pass
    assert says in str(caught.value)
