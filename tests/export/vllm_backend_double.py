"""A double of Triton's vLLM backend for CPUs: what a `config.pbtxt`, `model.json` and `multi_lora.json` must be to the vendor's `model.py`.

It completes the configuration, insists on decoupled answers and on KIND_MODEL for several GPUs, and hands `model.json` as it is to real vLLM
(`vllm_lines.py`, named by NRL_VLLM_LINES, in the Python of NRL_PYTHON). Beyond the vendor's contract it takes `input_ids` and gives `token_ids`,
so that tokens may be compared and not their text alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
INPUTS = (
    {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    {"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1], "optional": True},
    {"name": "stream", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "sampling_parameters", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    {"name": "exclude_input_in_output", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
)
OUTPUTS = (
    {"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "token_ids", "data_type": "TYPE_INT32", "dims": [-1]},
)


class TritonPythonModel:
    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        given = config.as_dict()
        for item in INPUTS:
            if item["name"] not in [held["name"] for held in given["input"]]:
                config.add_input(item)
        for item in OUTPUTS:
            if item["name"] not in [held["name"] for held in given["output"]]:
                config.add_output(item)
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        assert pb_utils.using_decoupled_model_transaction_policy(config), "answers must be decoupled"
        folder = Path(pb_utils.get_model_dir())
        assert (folder / "model.json").is_file(), f"'model.json' must be provided in '{folder}'"
        engine = json.loads((folder / "model.json").read_text())
        ranks = int(engine.get("tensor_parallel_size", 1)) * int(engine.get("pipeline_parallel_size", 1))
        if args["model_instance_kind"] == "GPU" and ranks > 1:
            raise ValueError("KIND_GPU is for one GPU, KIND_MODEL for several")
        lora = ""
        if str(engine.get("enable_lora", "")).lower() == "true":
            lora = str(folder / "multi_lora.json")
            json.loads(Path(lora).read_text())
        self.count = 0
        reads, writes = os.pipe()
        self.process = subprocess.Popen(
            [os.environ["NRL_PYTHON"], os.environ["NRL_VLLM_LINES"], str(folder / "model.json"), lora, str(writes)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            text=True,
            env={name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"},
            pass_fds=[writes],
        )
        os.close(writes)
        self.said = os.fdopen(reads)
        if json.loads(self.said.readline() or "{}") != {"ready": True}:
            raise RuntimeError(f"vLLM ended with exit code {self.process.wait(60)}; its message stands above")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._answer(request, request.get_response_sender())

    def finalize(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _answer(self, request: Any, sender: Any) -> None:
        text, ids = scalar(request, "text_input"), pb_utils.get_input_tensor_by_name(request, "input_ids")
        text = None if text is None else text.decode()
        stream, sampling = bool(scalar(request, "stream")), scalar(request, "sampling_parameters")
        self.count += 1
        asked = {
            "id": str(self.count),
            "text": text,
            "ids": None if ids is None else ids.as_numpy().tolist(),
            "sampling": json.loads(sampling) if sampling else {},
        }
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        before = "" if scalar(request, "exclude_input_in_output") or stream else text or ""
        said, finished = [], False
        while not finished:
            part = json.loads(self.said.readline())
            finished = part["finished"]
            said.append(part)
            if stream:
                sender.send(response(part["text"], part["ids"]), flags=FINAL if finished else 0)
        if not stream:
            text = before + "".join(part["text"] for part in said)
            sender.send(response(text, [token for part in said for token in part["ids"]]), flags=FINAL)


def scalar(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0]


def response(text: str, ids: list[int]) -> Any:
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object)),
            pb_utils.Tensor("token_ids", np.array(ids, dtype=np.int32)),
        ]
    )
