"""Strict validators of Triton model repositories for generating models, without a server.

Source: the layouts that `export.triton` names; `AsyncEngineArgs` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.export.hf_layout import hf_problems, peft_problems
from nemo_rl_like.export.pbtxt import Fields, Parsed, PbtxtError, parse
from nemo_rl_like.export.problems import Problem, read_object
from nemo_rl_like.export.triton import (
    ADAPTERS,
    ADD_VENDOR_FILES,
    CONFIG_PBTXT,
    LORA_RANKS,
    MODEL_JSON,
    MODEL_PY,
    MODEL_YAML,
    MULTI_LORA,
    PYTHON_INPUTS,
    PYTHON_OUTPUTS,
    PYTHON_SOURCE,
    REPOSITORY,
    TRTLLM_NAME,
    VERSION,
    WEIGHTS,
)
from nemo_rl_like.spec.nearest import nearest

MODEL_FIELDS = frozenset(
    [
        "name",
        "platform",
        "backend",
        "runtime",
        "version_policy",
        "max_batch_size",
        "input",
        "output",
        "batch_input",
        "batch_output",
        "optimization",
        "dynamic_batching",
        "sequence_batching",
        "ensemble_scheduling",
        "instance_group",
        "default_model_filename",
        "cc_model_filenames",
        "metric_tags",
        "parameters",
        "model_warmup",
        "model_operations",
        "model_transaction_policy",
        "model_repository_agents",
        "response_cache",
        "model_metrics",
    ]
)
"""Fields of Triton's `ModelConfig`."""
ENGINE_FIELDS = frozenset(
    [
        "model",
        "tokenizer",
        "tokenizer_mode",
        "trust_remote_code",
        "served_model_name",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "seed",
        "max_model_len",
        "load_format",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "distributed_executor_backend",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "block_size",
        "cpu_offload_gb",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager",
        "compilation_config",
        "disable_log_stats",
        "enable_log_requests",
        "max_logprobs",
        "generation_config",
        "override_generation_config",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "lora_dtype",
        "lora_target_modules",
        "fully_sharded_loras",
        "speculative_config",
        "reasoning_parser",
        "structured_outputs_config",
        "scheduling_policy",
        "download_dir",
        "revision",
    ]
)
"""Keys that `model.json` may have: arguments of vLLM's `AsyncEngineArgs` that say something of one served model."""
LLM_FIELDS = frozenset(
    [
        "model",
        "backend",
        "dtype",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "moe_expert_parallel_size",
        "max_seq_len",
        "max_batch_size",
        "max_num_tokens",
        "kv_cache_config",
        "quant_config",
        "enable_chunked_prefill",
        "cuda_graph_config",
        "tokenizer",
        "trust_remote_code",
        "lora_config",
        "triton_config",
        "logits_post_processors",
        "speculative_config",
    ]
)
"""Keys that `model.yaml` may have: arguments of TensorRT-LLM's `LLM`, and what the vendor's `model.py` takes out first."""
_TYPES = {"tensor_parallel_size": int, "pipeline_parallel_size": int, "max_model_len": int, "max_num_seqs": int,
          "max_loras": int, "max_lora_rank": int, "enable_lora": bool, "enforce_eager": bool}  # fmt: skip
_VLLM_PARAMETERS = (
    "GPU_DEVICE_IDS",
    "ENABLE_VLLM_HEALTH_CHECK",
    "REPORT_CUSTOM_METRICS",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
)


def python_problems(folder: Path) -> list[Problem]:
    """What a Triton server would stumble on in a `triton-python` bundle."""
    problems: list[Problem] = []
    for model, at in _models(folder, problems):
        config = _config(model, at, "python", "KIND_CPU", problems)
        file = model / VERSION / MODEL_PY
        if not file.is_file():
            problems.append(Problem(f"{at}/{VERSION}/{MODEL_PY}", "is missing; export again"))
        elif sha256_file(file) != sha256_file(PYTHON_SOURCE):
            problems.append(Problem(f"{at}/{VERSION}/{MODEL_PY}", "is not this version's; export again"))
        for field, wanted in (("input", PYTHON_INPUTS), ("output", PYTHON_OUTPUTS)):
            named = {_one(item, "name") for item in config.get(field, []) if isinstance(item, dict)}
            lost = sorted(str(i["name"]) for i in wanted if i["name"] not in named)
            if config and lost:
                problems.append(
                    Problem(f"{at}/{CONFIG_PBTXT}", f"has no {field} {lost[0]!r}, which {MODEL_PY} uses; add it")
                )
        for name in ("DTYPE", "MAX_NEW_TOKENS", "THREADS"):
            if config and name not in _parameters(config):
                problems.append(
                    Problem(f"{at}/{CONFIG_PBTXT}", f"has no parameter {name}, which {MODEL_PY} reads; add it")
                )
        problems += hf_problems(model / VERSION / WEIGHTS, f"{at}/{VERSION}/{WEIGHTS}")
    return problems


def vllm_problems(folder: Path, mounted_at: str | None) -> list[Problem]:
    """What Triton's vLLM backend would stumble on; `mounted_at`: where the bundle will be, None if that is not known."""
    problems: list[Problem] = []
    for model, at in _models(folder, problems):
        config = _config(model, at, "vllm", "KIND_MODEL", problems)
        unknown = sorted(set(_parameters(config)) - set(_VLLM_PARAMETERS))
        if unknown:
            problems.append(
                Problem(f"{at}/{CONFIG_PBTXT}", f"has the parameter {unknown[0]}, which the backend does not know")
            )
        name = f"{at}/{VERSION}/{MODEL_JSON}"
        engine, found = read_object(model / VERSION / MODEL_JSON, name)
        problems += found
        if engine:
            problems += [Problem(name, message) for message in _engine_problems(engine, folder, mounted_at)]
        problems += _adapter_problems(model, at, engine, folder, mounted_at)
    problems += hf_problems(folder / WEIGHTS, WEIGHTS)
    return problems


def trtllm_problems(folder: Path, mounted_at: str | None) -> list[Problem]:
    """What TensorRT-LLM's backend would stumble on, its own files aside, which `add_vendor_files.sh` brings."""
    model, name = folder / REPOSITORY / TRTLLM_NAME, f"{REPOSITORY}/{TRTLLM_NAME}/{VERSION}/{MODEL_YAML}"
    problems = hf_problems(folder / WEIGHTS, WEIGHTS)
    if not (folder / ADD_VENDOR_FILES).is_file():
        problems.append(Problem(ADD_VENDOR_FILES, "is missing; export again"))
    try:
        given = yaml.safe_load((model / VERSION / MODEL_YAML).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        return [*problems, Problem(name, f"cannot be read: {error}; export again")]
    if not isinstance(given, dict):
        return [*problems, Problem(name, "holds no mapping; export again")]
    messages = [_unknown(key, LLM_FIELDS, "TensorRT-LLM's LLM()") for key in sorted(set(given) - LLM_FIELDS)]
    messages += _path_problems(given, "model", WEIGHTS, mounted_at)
    if given.get("backend") != "pytorch":
        messages.append(f"has `backend` {given.get('backend')!r}, must be pytorch: engines are no longer built")
    triton = given.get("triton_config")
    if (
        not isinstance(triton, dict)
        or set(triton) - {"max_batch_size", "decoupled"}
        or triton.get("max_batch_size") != 0
    ):
        messages.append("needs `triton_config` with `max_batch_size: 0` and `decoupled`, and nothing else")
    return problems + [Problem(name, message) for message in messages]


def _models(folder: Path, problems: list[Problem]) -> list[tuple[Path, str]]:
    """The repository's models with their names in problems."""
    repository = folder / REPOSITORY
    found = sorted(path for path in repository.iterdir() if path.is_dir()) if repository.is_dir() else []
    if not found:
        problems.append(Problem(REPOSITORY, "has no model; export again"))
    for model in found:
        if not (model / VERSION).is_dir():
            problems.append(Problem(f"{REPOSITORY}/{model.name}", f"has no version folder {VERSION}; export again"))
    return [(model, f"{REPOSITORY}/{model.name}") for model in found]


def _config(model: Path, at: str, backend: str, kind: str, problems: list[Problem]) -> Fields:
    """The model's `config.pbtxt`; empty if it cannot be read."""
    name = f"{at}/{CONFIG_PBTXT}"
    try:
        config = parse((model / CONFIG_PBTXT).read_text(encoding="utf-8"))
    except (OSError, PbtxtError) as error:
        problems.append(Problem(name, f"cannot be read: {error}; write it again"))
        return {}
    unknown = sorted(set(config) - MODEL_FIELDS)
    messages = [_unknown(field, MODEL_FIELDS, "Triton's ModelConfig") for field in unknown]
    wanted: dict[str, Parsed] = {"name": model.name, "backend": backend, "max_batch_size": 0}
    for field, value in wanted.items():
        if config.get(field) != [value]:
            messages.append(f"has `{field}` {_shown(config.get(field))}, must be {value!r}; write it again")
    policy = config.get("model_transaction_policy", [])
    if [_one(item, "decoupled") for item in policy] != [True]:
        messages.append(
            "has no `model_transaction_policy { decoupled: true }`, without which answers cannot stream; add it"
        )
    groups = config.get("instance_group", [])
    if not groups or any(_one(group, "kind") != kind for group in groups):
        messages.append(f"needs an `instance_group` of kind {kind}; write it again")
    problems += [Problem(name, message) for message in messages]
    return config


def _engine_problems(engine: Mapping[str, Any], folder: Path, mounted_at: str | None) -> list[str]:
    messages = [_unknown(key, ENGINE_FIELDS, "vLLM's AsyncEngineArgs") for key in sorted(set(engine) - ENGINE_FIELDS)]
    messages += _path_problems(engine, "model", WEIGHTS, mounted_at)
    for key, kind in _TYPES.items():
        given = engine.get(key)
        wrong = type(given) is not kind or (isinstance(given, int) and kind is int and given < 1)
        if given is not None and wrong:
            messages.append(
                f"has `{key}` {given!r}, must be {'true or false' if kind is bool else 'an integer, 1 or more'}"
            )
    share = engine.get("gpu_memory_utilization", 0.9)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        messages.append(f"has `gpu_memory_utilization` {share!r}, must be above 0 and at most 1")
    config, _ = read_object(folder / WEIGHTS / "config.json", "")
    longest, context = engine.get("max_model_len"), config.get("max_position_embeddings")
    if isinstance(longest, int) and isinstance(context, int) and longest > context:
        messages.append(
            f"has `max_model_len` {longest}, and the model's context is {context} (`max_position_embeddings`)"
        )
    if engine.get("max_lora_rank", 8) not in LORA_RANKS:
        messages.append(
            f"has `max_lora_rank` {engine['max_lora_rank']!r}, must be one of {', '.join(map(str, LORA_RANKS))}"
        )
    return messages


def _adapter_problems(
    model: Path, at: str, engine: Mapping[str, Any], folder: Path, mounted_at: str | None
) -> list[Problem]:
    """Where `enable_lora` and `multi_lora.json` disagree, and what is wrong with an adapter."""
    file, name = model / VERSION / MULTI_LORA, f"{at}/{VERSION}/{MULTI_LORA}"
    if not engine.get("enable_lora"):
        return [Problem(name, f"is there, but {MODEL_JSON} has no `enable_lora: true`")] if file.exists() else []
    paths, problems = read_object(file, name)
    for adapter in sorted(paths):
        problems += [
            Problem(name, message)
            for message in _path_problems(paths, adapter, f"{ADAPTERS}/{adapter}", mounted_at)
        ]  # fmt: skip
        where = folder / ADAPTERS / adapter
        problems += peft_problems(where, f"{ADAPTERS}/{adapter}")
        config, _ = read_object(where / "adapter_config.json", "")
        rank, limit = config.get("r"), engine.get("max_lora_rank", 16)
        if isinstance(rank, int) and isinstance(limit, int) and rank > limit:
            problems.append(Problem(f"{ADAPTERS}/{adapter}", f"has rank {rank}, `max_lora_rank` is {limit}; raise it"))
    return problems


def _path_problems(given: Mapping[str, Any], key: str, inside: str, mounted_at: str | None) -> list[str]:
    path = given.get(key)
    if not isinstance(path, str) or not path.startswith("/") or not path.endswith(f"/{inside}"):
        return [f"has `{key}` {path!r}, must be an absolute path that ends in /{inside}"]
    if mounted_at is not None and path != f"{mounted_at}/{inside}":
        return [f"has `{key}` {path!r}, and the bundle is meant to be at {mounted_at}; export again with `mounted_at`"]
    return []


def _parameters(config: Fields) -> dict[str, object]:
    pairs = [item for item in config.get("parameters", []) if isinstance(item, dict)]
    return {str(_one(item, "key")): _one(item, "value") for item in pairs}


def _one(message: Parsed | None, field: str) -> Parsed | None:
    """The value of a field that is given once; None otherwise."""
    values = message.get(field) if isinstance(message, dict) else None
    return values[0] if values is not None and len(values) == 1 else None


def _unknown(key: str, known: frozenset[str], where: str) -> str:
    return f"has {key!r}, which {where} does not take{_near(key, known)}"


def _shown(values: list[Parsed] | None) -> str:
    return "missing" if values is None else repr(values[0] if len(values) == 1 else values)


def _near(key: str, known: frozenset[str]) -> str:
    near = nearest(key, sorted(known))
    return f"; did you mean `{near}`?" if near else "; remove it"
