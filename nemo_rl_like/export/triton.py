"""Triton model repositories: `triton-python` (our CPU reference), `triton-vllm` and `triton-trtllm`.

A bundle holds `model_repository/` for the server and, where the backend reads a Hugging Face folder, that folder as `weights/` beside it.
Layouts: vLLM backend of Triton 26.09 (https://github.com/triton-inference-server/vllm_backend), TensorRT-LLM's LLM API of the same release
(https://github.com/NVIDIA/TensorRT-LLM/tree/main/triton_backend), Python backend of Triton 2.51.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nemo_rl_like.export.folders import link_tree
from nemo_rl_like.export.hf_layout import ADAPTER_CONFIG, link_adapters
from nemo_rl_like.export.pbtxt import Enum, Value, dump
from nemo_rl_like.spec.export import TritonPythonTarget, TritonTrtllmTarget, TritonVllmTarget

REPOSITORY, WEIGHTS, ADAPTERS = "model_repository", "weights", "adapters"
VERSION = "1"
CONFIG_PBTXT, MODEL_JSON, MULTI_LORA, MODEL_PY, MODEL_YAML = (
    "config.pbtxt",
    "model.json",
    "multi_lora.json",
    "model.py",
    "model.yaml",
)
TRTLLM_NAME = "tensorrt_llm"
"""Name of the model that the vendor's `config.pbtxt` has."""
ADD_VENDOR_FILES = "add_vendor_files.sh"
_GIB = 1 << 30
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM has."""
PYTHON_SOURCE = Path(__file__).with_name("triton_model.py")
_STRING, _BOOL, _INT32 = Enum("TYPE_STRING"), Enum("TYPE_BOOL"), Enum("TYPE_INT32")
PYTHON_INPUTS: list[dict[str, Value]] = [
    {"name": "text_input", "data_type": _STRING, "dims": [1], "optional": True},
    {"name": "input_ids", "data_type": _INT32, "dims": [-1], "optional": True},
    {"name": "stream", "data_type": _BOOL, "dims": [1], "optional": True},
    {"name": "sampling_parameters", "data_type": _STRING, "dims": [1], "optional": True},
    {"name": "exclude_input_in_output", "data_type": _BOOL, "dims": [1], "optional": True},
]
PYTHON_OUTPUTS: list[dict[str, Value]] = [
    {"name": "text_output", "data_type": _STRING, "dims": [1]},
    {"name": "output_ids", "data_type": _INT32, "dims": [-1]},
    {"name": "finish_reason", "data_type": _STRING, "dims": [1]},
]
_VENDOR_SCRIPT = """\
#!/bin/sh
# Adds the vendor's config.pbtxt, model.py and helpers.py to this repository; run it where TensorRT-LLM's sources are (in the container, or a
# checkout of the tag that `python3 -c "import tensorrt_llm; print(tensorrt_llm.__version__)"` prints there).
set -eu
sources=${1:?usage: add_vendor_files.sh TENSORRT_LLM_SOURCES}
from="$sources/triton_backend/all_models/llmapi/tensorrt_llm"
to="$(dirname "$0")/model_repository/tensorrt_llm"
for file in config.pbtxt 1/model.py 1/helpers.py; do
  [ -f "$from/$file" ] || { echo "$from/$file does not exist; give the root of TensorRT-LLM's sources" >&2; exit 1; }
  cp "$from/$file" "$to/$file"
done
"""


def write_triton_python(hf: Path, folder: Path, target: TritonPythonTarget) -> None:
    """The repository with the weights in its version folder: it may be moved as it is."""
    model = folder / REPOSITORY / target.model_name
    link_tree(hf, model / VERSION / WEIGHTS)
    shutil.copyfile(PYTHON_SOURCE, model / VERSION / MODEL_PY)
    (model / CONFIG_PBTXT).write_text(python_config(target), encoding="utf-8")


def python_config(target: TritonPythonTarget) -> str:
    """Its `config.pbtxt`."""
    parameters = {"DTYPE": target.dtype, "MAX_NEW_TOKENS": target.max_new_tokens, "THREADS": target.threads}
    return dump(
        {
            **_common(target.model_name, "python", "KIND_CPU"),
            "input": list(PYTHON_INPUTS),
            "output": list(PYTHON_OUTPUTS),
            "parameters": _parameters({name: str(value) for name, value in parameters.items()}),
        }
    )


def write_triton_vllm(hf: Path, folder: Path, target: TritonVllmTarget) -> None:
    """The repository, the Hugging Face folder and the adapters that it names."""
    link_tree(hf, folder / WEIGHTS)
    for name, source in target.adapters.items():
        link_adapters(Path(source), folder / ADAPTERS / name)
    model = folder / REPOSITORY / target.model_name
    (model / VERSION).mkdir(parents=True)
    (model / CONFIG_PBTXT).write_text(vllm_config(target), encoding="utf-8")
    _write_json(model / VERSION / MODEL_JSON, engine_arguments(target, _largest_rank(folder, target)))
    if target.adapters:
        paths = {name: f"{target.mounted_at}/{ADAPTERS}/{name}" for name in target.adapters}
        _write_json(model / VERSION / MULTI_LORA, paths)


def vllm_config(target: TritonVllmTarget) -> str:
    """Its `config.pbtxt`: vLLM takes the GPUs (`KIND_MODEL`), batches itself, and answers in parts."""
    gpus = {"GPU_DEVICE_IDS": ",".join(map(str, target.gpu_ids))} if target.gpu_ids else {}
    return dump({**_common(target.model_name, "vllm", "KIND_MODEL"), "parameters": _parameters(gpus)})


def engine_arguments(target: TritonVllmTarget, largest_rank: int) -> dict[str, object]:
    """`model.json`: keyword arguments of vLLM's `AsyncEngineArgs`; what is None is left to vLLM."""
    given: dict[str, object | None] = {
        "model": f"{target.mounted_at}/{WEIGHTS}",
        "served_model_name": target.model_name,
        "dtype": target.dtype,
        "max_model_len": target.max_model_len,
        "tensor_parallel_size": target.tensor_parallel_size,
        "pipeline_parallel_size": target.pipeline_parallel_size,
        "gpu_memory_utilization": target.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if target.kv_cache_gib is None else int(target.kv_cache_gib * _GIB),
        "max_num_seqs": target.max_batch,
        "enforce_eager": target.enforce_eager,
    }
    if target.adapters:
        given |= {"enable_lora": True, "max_loras": len(target.adapters), "max_lora_rank": _rank_step(largest_rank)}
    return {name: value for name, value in given.items() if value is not None}


def write_triton_trtllm(hf: Path, folder: Path, target: TritonTrtllmTarget) -> None:
    """`model.yaml` and the weights; the vendor's own files come from its sources."""
    link_tree(hf, folder / WEIGHTS)
    version = folder / REPOSITORY / TRTLLM_NAME / VERSION
    version.mkdir(parents=True)
    (version / MODEL_YAML).write_text(_yaml(llm_arguments(target)), encoding="utf-8")
    (folder / ADD_VENDOR_FILES).write_text(_VENDOR_SCRIPT, encoding="utf-8")


def llm_arguments(target: TritonTrtllmTarget) -> dict[str, object]:
    """`model.yaml`: keyword arguments of TensorRT-LLM's `LLM`, and what overrides Triton's configuration."""
    given: dict[str, object | None] = {
        "model": f"{target.mounted_at}/{WEIGHTS}",
        "backend": "pytorch",
        "dtype": target.dtype,
        "tensor_parallel_size": target.tensor_parallel_size,
        "pipeline_parallel_size": target.pipeline_parallel_size,
        "max_seq_len": target.max_seq_len,
        "max_batch_size": target.max_batch,
        "kv_cache_config": {"free_gpu_memory_fraction": target.kv_cache_share},
        "triton_config": {"max_batch_size": 0, "decoupled": target.streaming},
    }
    return {name: value for name, value in given.items() if value is not None}


def _common(name: str, backend: str, kind: str) -> dict[str, Value]:
    return {
        "name": name,
        "backend": backend,
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "instance_group": [{"count": 1, "kind": Enum(kind)}],
    }


def _parameters(values: dict[str, str]) -> list[Value]:
    return [{"key": key, "value": {"string_value": value}} for key, value in values.items()]


def _largest_rank(folder: Path, target: TritonVllmTarget) -> int:
    configs = [folder / ADAPTERS / name / ADAPTER_CONFIG for name in target.adapters]
    return max((int(json.loads(config.read_bytes())["r"]) for config in configs), default=0)


def _rank_step(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM's that holds it."""
    return next(step for step in LORA_RANKS if step >= rank)


def _write_json(file: Path, value: dict[str, object] | dict[str, str]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _yaml(value: dict[str, object]) -> str:
    """JSON's scalars are YAML's, so a mapping of two levels needs no library."""
    lines = []
    for name, item in value.items():
        if isinstance(item, dict):
            lines += [f"{name}:", *(f"  {key}: {json.dumps(inner)}" for key, inner in item.items())]
        else:
            lines.append(f"{name}: {json.dumps(item)}")
    return "\n".join(lines) + "\n"
