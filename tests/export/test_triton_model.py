"""`model.py` of the `triton-python` bundle decodes as the trainer does; Triton's module is a stand-in here, with NumPy arrays for tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nemo_rl_like.data.tokenizer import load_tokenizer
from nemo_rl_like.export.parity_process import trainers
from nemo_rl_like.export.pbtxt import parse

PROMPTS = ([5, 70, 200], [100, 101, 102, 103, 104, 105, 106], [287, 2, 40, 41])
TOKENS, FINAL = 12, 1


class Tensor:
    def __init__(self, name: str, values: np.ndarray[Any, Any]) -> None:
        self.name, self.values = name, values

    @classmethod
    def from_dlpack(cls, name: str, values: Any) -> Tensor:
        return cls(name, np.from_dlpack(values))

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self.values


class Answer:
    """A response, and the flags that it was sent with."""

    def __init__(self, tensors: tuple[Tensor, ...] = (), error: str | None = None) -> None:
        self.error, self.flags = error, 0
        self.values = {tensor.name: tensor.values.tolist() for tensor in tensors}


class Request:
    """A request and its own sender."""

    def __init__(self, parameters: str = "", **values: Any) -> None:
        self.tensors = {name: Tensor(name, value) for name, value in values.items()}
        self.answers: list[Answer] = []
        self._parameters = parameters

    def get_response_sender(self) -> Request:
        return self

    def parameters(self) -> str:
        return self._parameters

    def is_cancelled(self) -> bool:
        assert FINAL not in [answer.flags for answer in self.answers], (
            "asked behind the last answer, the server ends by a segmentation fault"
        )
        return False

    def send(self, answer: Answer, flags: int = 0) -> None:
        answer.flags = flags
        self.answers.append(answer)


@pytest.fixture(scope="module")
def model(bundles: Path) -> Iterator[Any]:
    """The bundle's model, made ready as the server does with its `config.pbtxt`."""
    folder = bundles / "triton-python" / "model_repository" / "model"
    triton: Any = ModuleType("triton_python_backend_utils")
    triton.Tensor, triton.InferenceResponse, triton.TritonError = Tensor, Answer, str
    triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    triton.get_input_tensor_by_name = lambda request, name: request.tensors.get(name)
    triton.get_model_dir = lambda: str(folder / "1")
    parameters = {
        str(item["key"][0]): {"string_value": item["value"][0]["string_value"][0]}  # type: ignore[index, call-overload]
        for item in parse((folder / "config.pbtxt").read_text())["parameters"]
    }
    spec = spec_from_file_location("bundled_model", folder / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, triton.__name__, triton)
        spec.loader.exec_module(module)
        made = module.TritonPythonModel()
        made.initialize({"model_config": json.dumps({"parameters": parameters})})
        yield made


def text(value: str) -> np.ndarray[Any, Any]:
    return np.array([value.encode()], dtype=object)


def ids(values: list[int]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int32)


def answers(model: Any, request: Request) -> list[Answer]:
    model.execute([request])
    assert [answer.flags for answer in request.answers] == [0] * (len(request.answers) - 1) + [FINAL]
    return request.answers


def test_greedy_tokens_are_the_trainers_at_once_and_in_parts(model: Any, run_folder: Path) -> None:
    weights = run_folder / "sft" / "checkpoints" / "step_3" / "weights"
    rows = [list(prompt) for prompt in PROMPTS]
    reference, _, greedy = trainers(weights, rows, rows, TOKENS)
    assert reference == "megatron"
    tokenizer, how = load_tokenizer(weights), json.dumps({"max_tokens": TOKENS, "ignore_eos": True})
    for prompt, wanted in zip(PROMPTS, greedy, strict=True):
        (by_parameters,) = answers(model, Request(how, input_ids=ids(prompt)))
        assert tuple(by_parameters.values["output_ids"]) == wanted
        asked = {"input_ids": ids(prompt), "sampling_parameters": text(how)}
        (whole,) = answers(model, Request(**asked, exclude_input_in_output=np.array([True])))
        assert tuple(whole.values["output_ids"]) == wanted and whole.values["finish_reason"] == [b"length"]
        assert whole.values["text_output"] == [tokenizer.decode(wanted, skip_special_tokens=True).encode()]
        parts = answers(model, Request(**asked, stream=np.array([True])))
        assert tuple(token for part in parts for token in part.values["output_ids"]) == wanted and len(parts) == TOKENS
        assert b"".join(part.values["text_output"][0] for part in parts) == whole.values["text_output"][0]
        assert [part.values["finish_reason"][0] for part in parts] == [b""] * (TOKENS - 1) + [b"length"]


def test_an_answer_ends_at_a_stop_token_and_samples_are_a_function_of_the_seed(model: Any) -> None:
    def said(**how: object) -> Answer:
        (answer,) = answers(model, Request(json.dumps({"max_tokens": TOKENS, **how}), input_ids=ids(PROMPTS[0])))
        return answer

    greedy = said(ignore_eos=True).values["output_ids"]
    stopped = said(stop_token_ids=[greedy[3]]).values
    assert stopped["output_ids"] == greedy[: greedy.index(greedy[3]) + 1] and stopped["finish_reason"] == [b"stop"]
    drawn = [said(temperature=2.0, seed=seed, ignore_eos=True).values["output_ids"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != greedy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text_input": text("two"), "parameters": '{"max_token": 3}'}, "is not one of max_tokens"),
        ({"text_input": text("two"), "parameters": '{"max_tokens": 999}'}, "must be in 1 .. 256"),
        ({"text_input": text("two"), "parameters": '{"temperature": -1}'}, "must be 0 (greedy) or more"),
        ({"text_input": text("two"), "parameters": "[]"}, "must be a JSON object"),
        ({"text_input": text("two"), "input_ids": ids([5])}, "give one of `text_input` and `input_ids`"),
        ({}, "give one of `text_input` and `input_ids`"),
        ({"input_ids": ids([5, 288])}, "must have ids in 0 .. 287"),
        ({"input_ids": ids([5] * 128)}, "the context of 128 leaves no room"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(model: Any, given: dict[str, Any], words: str) -> None:
    (answer,) = answers(model, Request(**given))
    assert answer.error is not None and words in answer.error and answer.values == {}
