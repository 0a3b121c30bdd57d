"""The `triton-vllm` bundle under a real tritonserver with a double of the vLLM backend in front of real vLLM; and vLLM's own server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_rl_like.export.check import check_bundle
from nemo_rl_like.export.parity_process import trainers
from nemo_rl_like.export.triton_layout import ENGINE_FIELDS
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.stages.api import export_checkpoint
from tests.export.test_layouts import edited, removed, replaced
from tests.export.triton_server import free_port, triton
from tests.export.vllm_process import SETTINGS

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(1500)]
HERE = Path(__file__).parent
DOUBLE = {"vllm": HERE / "vllm_backend_double.py"}
PROMPTS = ([5, 70, 200], [100, 101, 102, 103, 104, 105, 106], [287, 2, 40, 41])
TOKENS = 12
HOW = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def vllm_settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("NRL_PYTHON", sys.executable)
        patch.setenv("NRL_VLLM_PROCESS", str(HERE / "vllm_process.py"))
        yield


def greedy(weights: Path) -> list[tuple[int, ...]]:
    """What Megatron says after each prompt."""
    rows = [list(prompt) for prompt in PROMPTS]
    return trainers(weights, rows, rows, TOKENS)[2]


def base_run(folder: Path) -> Path:
    """A checkpoint whose weights are the base's, so that adapters are to be served over it."""
    from tests.export.made import make_run

    return make_run(folder / "run")


@pytest.fixture(scope="module")
def served(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the base with the run's adapters beside it, at the place that it names."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint = base_run(folder)
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
    with triton(served / "model_repository", tmp_path, DOUBLE, timeout_s=500) as server:
        for prompt, plain, adapted in zip(PROMPTS, base, merged, strict=True):
            for wanted, more in ((plain, {}), (adapted, {"lora_name": "sums"})):
                body = {"input_ids": prompt, "sampling_parameters": json.dumps({**HOW, **more})}
                assert tuple(server.post("/v2/models/model/generate", body)["token_ids"]) == wanted
                parts = server.stream("/v2/models/model/generate_stream", {**body, "stream": True})
                assert tuple(i for part in parts for i in ids_of(part)) == wanted and len(parts) > 1
        said = server.post(
            "/v2/models/model/generate", {"text_input": "two and", "sampling_parameters": json.dumps(HOW)}
        )
        assert said["text_output"].startswith("two and")


def ids_of(part: dict[str, object]) -> list[int]:
    """A tensor of one value comes as that value."""
    found = part["token_ids"]
    return list(found) if isinstance(found, list) else [int(str(found))]


@pytest.mark.parametrize(
    ("breaks", "path", "says"),
    [
        (removed("model_repository/model/1/model.json"), "model_repository/model/1/model.json", "must be provided in"),
        (removed("model_repository/model/1/multi_lora.json"), "model_repository/model/1/multi_lora.json", "multi_lora.json"),
        (edited("model_repository/model/1/model.json", disable_log_requests=True), "model_repository/model/1/model.json",
         "unexpected keyword argument 'disable_log_requests'"),
        (edited("model_repository/model/1/model.json", max_model_len=4096), "model_repository/model/1/model.json", "max_model_len"),
        (removed("weights/config.json"), "weights/config.json", "config.json"),
        (replaced("model_repository/model/config.pbtxt", "max_batch_size", "max_batch_sice"),
         "model_repository/model/config.pbtxt", "max_batch_sice"),
        (replaced("model_repository/model/config.pbtxt", 'name: "model"', 'name: "other"'),
         "model_repository/model/config.pbtxt", "model name"),
    ],
    ids=["no model.json", "no multi_lora.json", "unknown argument", "beyond the context", "no config.json", "unknown field", "other name"],
)  # fmt: skip
def test_what_the_validator_refuses_the_real_server_would_not_load(
    served: Path, tmp_path: Path, breaks: Callable[[Path], object], path: str, says: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(served, folder)
    (folder / "manifest.json").unlink()
    file = folder / "model_repository" / "model" / "1" / "model.json"
    file.write_text(file.read_text().replace(str(served), str(folder)))
    loras = folder / "model_repository" / "model" / "1" / "multi_lora.json"
    loras.write_text(loras.read_text().replace(str(served), str(folder)))
    assert check_bundle(folder).problems == ()
    breaks(folder)
    assert path in [problem.path for problem in check_bundle(folder).problems]
    with (
        pytest.raises(RuntimeError, match="tritonserver ended with exit code 1") as caught,
        triton(folder / "model_repository", tmp_path / "server", DOUBLE, timeout_s=300),
    ):
        pass
    assert says in str(caught.value) + (tmp_path / "server" / "triton.log").read_text()


def test_the_engine_arguments_that_pass_are_vllms(served: Path) -> None:
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs

    assert {field.name for field in dataclasses.fields(AsyncEngineArgs)} >= ENGINE_FIELDS


def test_vllms_own_server_serves_the_folder_and_the_adapter(bundles: Path, run_folder: Path, tmp_path: Path) -> None:
    merged = greedy(run_folder / "sft" / "checkpoints" / "step_3" / "weights")
    base = run_folder.parent / "base"
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"sums={bundles / 'hf-lora'}"]
    with openai_server(bundles / "hf", [], tmp_path / "hf.log") as ask:
        assert [ask(prompt, str(bundles / "hf")) for prompt in PROMPTS] == merged
    with openai_server(base, lora, tmp_path / "lora.log") as ask:
        assert [ask(prompt, "sums") for prompt in PROMPTS] == merged
        assert [ask(prompt, str(base)) for prompt in PROMPTS] != merged


@contextmanager
def openai_server(
    folder: Path, more: list[str], log: Path
) -> Iterator[Callable[[Sequence[int], str], tuple[int, ...]]]:
    """`vllm serve`; gives a function that asks a model for the greedy tokens after a prompt."""
    port = free_port()
    options = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
        "--enforce-eager",
    ]
    options += ["--kv-cache-memory-bytes", str(50 << 20), "--max-num-seqs", "4", *more]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def post(path: str, body: dict[str, object] | None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", None if body is None else json.dumps(body).encode()
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=200) as response:
            found: bytes = response.read()
        return found

    def ask(prompt: Sequence[int], model: str) -> tuple[int, ...]:
        body = {"model": model, "prompt": list(prompt), **HOW, "return_token_ids": True}
        return tuple(json.loads(post("/v1/completions", body))["choices"][0]["token_ids"])

    try:
        deadline = time.monotonic() + 500
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                post("/health", None)
                break
            except OSError:
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
        yield ask
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(120)
