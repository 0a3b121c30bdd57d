"""vLLM's own server serves the Hugging Face folder and the adapters, and knows every argument that a `triton-vllm` bundle may have."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_rl_like.export.parity_process import trainers
from nemo_rl_like.export.triton import engine_arguments
from nemo_rl_like.export.triton_layout import ENGINE_FIELDS
from nemo_rl_like.spec.export import TritonVllmTarget
from tests.generation.vllm_adapter import SETTINGS
from tests.ports import free_port

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(1500)]
PROMPTS = ([5, 70, 200], [100, 101, 102, 103, 104, 105, 106], [287, 2, 40, 41])
TOKENS = 12
HOW = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}


def greedy(weights: Path) -> list[tuple[int, ...]]:
    """What Megatron says after each prompt."""
    rows = [list(prompt) for prompt in PROMPTS]
    return trainers(weights, rows, rows, TOKENS)[2]


def test_the_engine_arguments_that_pass_are_vllms(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert {field.name for field in dataclasses.fields(AsyncEngineArgs)} >= ENGINE_FIELDS
    target = TritonVllmTarget(max_model_len=64, max_batch=4, kv_cache_gib=0.05, adapters={"a": "x"})
    AsyncEngineArgs(**engine_arguments(target, 4) | {"model": str(tmp_path)})


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
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **SETTINGS}
        )

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
