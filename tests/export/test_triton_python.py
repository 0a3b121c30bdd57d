"""A real tritonserver decodes the `triton-python` bundle as the trainer does: over HTTP, gRPC and streams."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
import tritonclient.grpc as client

from nemo_rl_like.data.tokenizer import load_tokenizer
from nemo_rl_like.export.parity_process import trainers
from tests.export.triton_server import Triton, triton

pytestmark = pytest.mark.service
PROMPTS = ([5, 70, 200], [100, 101, 102, 103, 104, 105, 106], [287, 2, 40, 41])
TOKENS = 12


@pytest.fixture(scope="module")
def weights(run_folder: Path) -> Path:
    return run_folder / "sft" / "checkpoints" / "step_3" / "weights"


@pytest.fixture(scope="module")
def greedy(weights: Path) -> list[tuple[int, ...]]:
    """What Megatron says after each prompt."""
    rows = [list(prompt) for prompt in PROMPTS]
    reference, _, ids = trainers(weights, rows, rows, TOKENS)
    assert reference == "megatron"
    return ids


@pytest.fixture(scope="module")
def server(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with triton(bundles / "triton-python" / "model_repository", tmp_path_factory.mktemp("triton")) as running:
        yield running


def test_greedy_tokens_are_the_trainers_over_http_grpc_and_streams(
    server: Triton, greedy: list[tuple[int, ...]], weights: Path
) -> None:
    tokenizer = load_tokenizer(weights)
    how = json.dumps({"max_tokens": TOKENS, "ignore_eos": True})
    for prompt, ids in zip(PROMPTS, greedy, strict=True):
        plain = {"input_ids": prompt, "parameters": {"max_tokens": TOKENS, "ignore_eos": True}}
        assert tuple(server.post("/v2/models/model/generate", plain)["output_ids"]) == ids
        said = server.post(
            "/v2/models/model/generate",
            {"input_ids": prompt, "sampling_parameters": how, "exclude_input_in_output": True},
        )
        assert tuple(said["output_ids"]) == ids and said["finish_reason"] == "length"
        assert said["text_output"] == tokenizer.decode(ids, skip_special_tokens=True)
        parts = server.stream(
            "/v2/models/model/generate_stream", {"input_ids": prompt, "sampling_parameters": how, "stream": True}
        )
        assert tuple(part["output_ids"] for part in parts) == ids
        assert "".join(part["text_output"] for part in parts) == said["text_output"]
        assert [part["finish_reason"] for part in parts] == [*[""] * (TOKENS - 1), "length"]
        assert streamed(server.grpc, prompt, how, stream=True) == [[token] for token in ids]
        assert streamed(server.grpc, prompt, how, stream=False) == [list(ids)]


def test_an_answer_ends_at_the_stop_token_and_sampling_is_a_function_of_the_seed(
    server: Triton, greedy: list[tuple[int, ...]]
) -> None:
    path, prompt = "/v2/models/model/generate", PROMPTS[0]
    stop = greedy[0][3]
    how = {"max_tokens": TOKENS, "stop_token_ids": [stop]}
    said = server.post(path, {"input_ids": prompt, "sampling_parameters": json.dumps(how)})
    assert tuple(said["output_ids"]) == greedy[0][: greedy[0].index(stop) + 1] and said["finish_reason"] == "stop"
    drawn = []
    for seed in (1, 1, 2):
        how = {"max_tokens": TOKENS, "temperature": 2.0, "seed": seed, "ignore_eos": True}
        drawn.append(server.post(path, {"input_ids": prompt, "sampling_parameters": json.dumps(how)})["output_ids"])
    assert drawn[0] == drawn[1] != drawn[2] and tuple(drawn[0]) != greedy[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text_input": "two", "sampling_parameters": '{"max_token": 3}'}, "is not one of max_tokens"),
        ({"text_input": "two", "sampling_parameters": '{"max_tokens": 999}'}, "must be in 1 .. 256"),
        ({"text_input": "two", "sampling_parameters": '{"temperature": -1}'}, "must be 0 (greedy) or more"),
        ({"text_input": "two", "input_ids": [5]}, "give one of `text_input` and `input_ids`"),
        ({"sampling_parameters": "{}"}, "give one of `text_input` and `input_ids`"),
        ({"input_ids": [5, 288]}, "must have ids in 0 .. 287"),
        ({"input_ids": [5] * 128}, "the context of 128 leaves no room"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(server: Triton, body: dict[str, object], words: str) -> None:
    with pytest.raises(HTTPError) as caught:
        server.post("/v2/models/model/generate", body)
    assert words in json.loads(caught.value.read())["error"]


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
            assert isinstance(answer, client.InferResult), answer
            output = answer.as_numpy("output_ids")
            if output is not None and output.size:
                found.append(output.tolist())
            if answer.get_response().parameters["triton_final_response"].bool_param:
                break
        server.stop_stream()
    return found
