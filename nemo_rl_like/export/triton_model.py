"""Triton's Python backend: decodes a Hugging Face folder on CPUs with transformers, one token after another, greedily or by sampling.

It is copied into a model repository as `1/model.py` beside `1/weights` and needs torch and transformers in the server's Python, nothing else.
Inputs follow Triton's vLLM backend (`text_input`, `stream`, `sampling_parameters` as JSON), and `input_ids` may stand for the text.
`sampling_parameters`, or the request's own parameters where that is missing: `max_tokens`, `temperature` (0, the default, is greedy), `seed`, `ignore_eos`, `stop_token_ids`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_SAMPLING = ("max_tokens", "temperature", "seed", "ignore_eos", "stop_token_ids")


class TritonPythonModel:
    """What the backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights beside this file."""
        _check_arrays()
        config = json.loads(args["model_config"])
        given = {name: value["string_value"] for name, value in config["parameters"].items()}
        torch.set_num_threads(int(given["THREADS"]))
        weights = Path(pb_utils.get_model_dir()) / "weights"
        self.longest = int(given["MAX_NEW_TOKENS"])
        self.tokenizer = AutoTokenizer.from_pretrained(str(weights), local_files_only=True, trust_remote_code=False)
        self.model = AutoModelForCausalLM.from_pretrained(
            str(weights), dtype=getattr(torch, given["DTYPE"]), local_files_only=True, trust_remote_code=False
        ).eval()
        ends = GenerationConfig.from_pretrained(str(weights)).eos_token_id
        self.stops = frozenset([ends] if isinstance(ends, int) else ends or ())

    def execute(self, requests: list[Any]) -> None:
        """Answer each request through its sender: in parts where it asks to stream, else at once."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._answer(request, sender)
            except (ValueError, TypeError) as error:
                failed = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
                sender.send(failed, flags=_FINAL)

    def _answer(self, request: Any, sender: Any) -> None:
        given = _scalar(request, "sampling_parameters")
        asked = self._sampling(request.parameters() if given is None else given)
        prompt, text = self._prompt(request)
        stream = bool(_scalar(request, "stream"))
        ids: list[int] = []
        said, reason = "", ""
        for token, reason in self._tokens(prompt, asked):
            ids.append(token)
            if stream:
                part, said = self._next_part(ids, said, last=bool(reason))
                sender.send(_response(part, [token], reason), flags=_FINAL if reason else 0)
            if not reason and request.is_cancelled():  # behind the last answer, asking ends the server
                sender.send(flags=_FINAL)
                return
        if not stream:
            before = "" if bool(_scalar(request, "exclude_input_in_output")) else text
            sender.send(_response(before + self._text(ids), ids, reason), flags=_FINAL)

    def _prompt(self, request: Any) -> tuple[list[int], str]:
        """Token ids [n] of the prompt, and its text. Raises ValueError."""
        given, text = pb_utils.get_input_tensor_by_name(request, "input_ids"), _scalar(request, "text_input")
        if (given is None) == (text is None):
            raise ValueError("give one of `text_input` and `input_ids`")
        ids = self.tokenizer(text.decode()).input_ids if given is None else given.as_numpy().reshape(-1).tolist()
        if not ids or min(ids) < 0 or max(ids) >= self.model.config.vocab_size:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, must have ids in 0 .. {self.model.config.vocab_size - 1}"
            )
        return ids, str(self.tokenizer.decode(ids)) if text is None else text.decode()

    def _sampling(self, given: bytes | str) -> dict[str, Any]:
        """The request's sampling parameters. Raises ValueError for one that is not known or out of range."""
        asked = json.loads(given or "{}")
        if not isinstance(asked, dict):
            raise ValueError(f"`sampling_parameters` is {asked!r}, must be a JSON object")
        unknown = sorted(set(asked) - set(_SAMPLING))
        if unknown:
            raise ValueError(f"`sampling_parameters` has {unknown[0]!r}, which is not one of {', '.join(_SAMPLING)}")
        tokens, temperature = asked.setdefault("max_tokens", min(16, self.longest)), asked.setdefault("temperature", 0)
        if not 1 <= tokens <= self.longest:
            raise ValueError(f"`max_tokens` is {tokens}, must be in 1 .. {self.longest}")
        if temperature < 0:
            raise ValueError(f"`temperature` is {temperature}, must be 0 (greedy) or more")
        return dict(asked)

    @torch.inference_mode()
    def _tokens(self, prompt: list[int], asked: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Each token, and with the last why it is: `stop` or `length`. Raises ValueError if the context cannot hold them."""
        context = self.model.config.max_position_embeddings
        if len(prompt) >= context:
            raise ValueError(f"the prompt has {len(prompt)} tokens, and the context of {context} leaves no room")
        count = min(asked["max_tokens"], context - len(prompt))
        stops = frozenset() if asked.get("ignore_eos") else self.stops | frozenset(asked.get("stop_token_ids", ()))
        draws = torch.Generator().manual_seed(asked.get("seed", 0))
        ids, past = torch.tensor([prompt]), None
        for left in range(count, 0, -1):
            out = self.model(input_ids=ids, past_key_values=past, use_cache=True)
            token, past = _draw(out.logits[0, -1].float(), asked["temperature"], draws), out.past_key_values
            yield token, "stop" if token in stops else "length" if left == 1 else ""
            if token in stops:
                return
            ids = torch.tensor([[token]])

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _next_part(self, ids: list[int], said: str, *, last: bool) -> tuple[str, str]:
        """What the last token adds to the text, and the text; nothing while a character is incomplete."""
        text = self._text(ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return "", said
        return text[len(said) :], text


def _check_arrays() -> None:
    """Raises RuntimeError if the backend was built for another NumPy than this Python's: its arrays would hold wrong values."""
    given = torch.arange(1, 4, dtype=torch.int32)
    read = pb_utils.Tensor.from_dlpack("given", given).as_numpy().tolist()
    if read != given.tolist():
        raise RuntimeError(
            f"the Python backend gives the tensor {given.tolist()} as the array {read}: it was built for another major version of NumPy "
            f"than this Python's {np.__version__}; install numpy<2, or take a newer server"
        )


def _draw(logits: torch.Tensor, temperature: float, draws: torch.Generator) -> int:
    """A token of logits [V]: the largest at temperature 0, else one by its probability."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws))


def _scalar(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _response(text: str, ids: list[int], reason: str) -> Any:
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object)),
            pb_utils.Tensor("output_ids", np.array(ids, dtype=np.int32)),
            pb_utils.Tensor("finish_reason", np.array([reason.encode()], dtype=object)),
        ]
    )
