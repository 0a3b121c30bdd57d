"""A real tritonserver decodes the `triton-python` bundle as the trainer does, over HTTP, gRPC and streams, and loads no bundle that the validator refuses."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
import tritonclient.grpc as client

from nemo_rl_like.data.tokenizer import load_tokenizer
from nemo_rl_like.export.check import check_bundle
from nemo_rl_like.export.parity_process import trainers
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.stages.api import export_checkpoint
from tests.export.test_layouts import edited, removed, replaced, shard, written
from tests.export.triton_server import SITE, triton

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]
PROMPTS = ([5, 70, 200], [100, 101, 102, 103, 104, 105, 106], [287, 2, 40, 41])
TOKENS = 12
GENERATE, MODEL = "/v2/models/model/generate", "model_repository/model"
WEIGHTS = f"{MODEL}/1/weights"


@pytest.fixture(scope="module")
def bundle(run_folder: Path) -> Path:
    """A `triton-python` bundle of the run."""
    stage = ExportStageSpec.model_validate({"targets": [{"kind": "triton-python"}], "parity": "weights"})
    (made,) = export_checkpoint(run_folder, run_folder.parent / "triton-python", stage)
    return made


def test_greedy_tokens_are_the_trainers_over_http_grpc_and_streams(
    bundle: Path, run_folder: Path, tmp_path: Path
) -> None:
    weights = run_folder / "sft" / "checkpoints" / "step_3" / "weights"
    tokenizer, how = load_tokenizer(weights), json.dumps({"max_tokens": TOKENS, "ignore_eos": True})
    text = "two and three"
    prompts = [*(list(prompt) for prompt in PROMPTS), tokenizer(text).input_ids]
    reference, _, greedy = trainers(weights, prompts, prompts, TOKENS)
    assert reference == "megatron"
    with triton(bundle / "model_repository", tmp_path, completes=False) as server:
        for prompt, ids in zip(prompts, greedy, strict=True):
            body = {"input_ids": prompt, "sampling_parameters": how}
            said = server.post(GENERATE, {**body, "exclude_input_in_output": True})
            assert tuple(said["output_ids"]) == ids and said["finish_reason"] == "length"
            assert said["text_output"] == tokenizer.decode(ids, skip_special_tokens=True)
            parts = server.stream(f"{GENERATE}_stream", {**body, "stream": True})
            assert tuple(part["output_ids"] for part in parts) == ids
            assert "".join(part["text_output"] for part in parts) == said["text_output"]
            assert [part["finish_reason"] for part in parts] == [*[""] * (TOKENS - 1), "length"]
            assert streamed(server.grpc, prompt, how, stream=True) == [[token] for token in ids]
            assert streamed(server.grpc, prompt, how, stream=False) == [list(ids)]
        by_text = {"text_input": text, "parameters": {"max_tokens": TOKENS, "ignore_eos": True}}
        said = server.post(GENERATE, by_text)
        assert tuple(said["output_ids"]) == greedy[-1] and said["text_output"].startswith(text)
        with pytest.raises(HTTPError) as caught:
            server.post(GENERATE, {"text_input": text, "sampling_parameters": '{"max_tokens": 999}'})
        assert "must be in 1 .. 256" in json.loads(caught.value.read())["error"]


def streamed(port: int, prompt: list[int], how: str, *, stream: bool) -> list[list[int]]:
    """The ids of each response over gRPC."""
    ids = client.InferInput("input_ids", [len(prompt)], "INT32")
    ids.set_data_from_numpy(np.array(prompt, dtype=np.int32))
    parameters = client.InferInput("sampling_parameters", [1], "BYTES")
    parameters.set_data_from_numpy(np.array([how.encode()], dtype=object))
    flag = client.InferInput("stream", [1], "BOOL")
    flag.set_data_from_numpy(np.array([stream]))
    answers: queue.Queue[object] = queue.Queue()
    found = []
    with client.InferenceServerClient(f"127.0.0.1:{port}") as server:
        server.start_stream(lambda result, error: answers.put(error or result))
        server.async_stream_infer("model", [ids, parameters, flag], enable_empty_final_response=True)
        while True:
            answer = answers.get(timeout=120)
            assert isinstance(answer, client.InferResult), str(answer)
            output = answer.as_numpy("output_ids")
            if output is not None and output.size:
                found.append(output.tolist())
            if answer.get_response().parameters["triton_final_response"].bool_param:
                break
        server.stop_stream()
    return found


def without_shard(folder: Path) -> None:
    shard(folder / WEIGHTS)
    sorted((folder / WEIGHTS).glob("model-*.safetensors"))[0].unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "path", "says"),
    [
        (removed(f"{WEIGHTS}/tokenizer.json"), f"{WEIGHTS}/tokenizer.json", "okenizer"),
        (written(f"{WEIGHTS}/config.json", "{"), f"{WEIGHTS}/config.json", "config.json"),
        (edited(f"{WEIGHTS}/config.json", model_type=None), f"{WEIGHTS}/config.json", "model_type"),
        (without_shard, f"{WEIGHTS}/model.safetensors.index.json", "model-00001-of"),
        (removed(f"{WEIGHTS}/generation_config.json"), f"{WEIGHTS}/generation_config.json", "generation_config.json"),
        (replaced(f"{MODEL}/config.pbtxt", '"THREADS"', '"X"'), f"{MODEL}/config.pbtxt", "THREADS"),
        (replaced(f"{MODEL}/config.pbtxt", "max_batch_size", "max_batch_sice"), f"{MODEL}/config.pbtxt", "max_batch_sice"),
    ],
    ids=["no tokenizer", "bad JSON", "no model type", "no shard", "no stop tokens", "no parameter", "unknown field"],
)  # fmt: skip
def test_what_the_validator_refuses_the_server_does_not_load(
    bundle: Path, tmp_path: Path, breaks: Callable[[Path], object], path: str, says: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    (folder / "manifest.json").unlink()
    assert check_bundle(folder).problems == ()
    breaks(folder)
    assert path in [problem.path for problem in check_bundle(folder).problems]
    assert says in refused(folder, tmp_path / "server")


@pytest.mark.slow
def test_a_server_that_was_built_for_another_numpy_is_refused_where_its_arrays_would_be_wrong(
    bundle: Path, tmp_path: Path
) -> None:
    assert int(np.__version__.split(".")[0]) == 2
    said = refused(bundle, tmp_path, numpy=SITE)
    assert "[1, 2, 3] as the array [1, 1, 1]" in said and "install numpy<2" in said


def refused(bundle: Path, scratch: Path, **how: Path) -> str:
    """What the server says, which does not load the bundle."""
    with (
        pytest.raises(RuntimeError, match="tritonserver ended with exit code 1") as caught,
        triton(bundle / "model_repository", scratch, **how),
    ):
        pass
    return str(caught.value)
