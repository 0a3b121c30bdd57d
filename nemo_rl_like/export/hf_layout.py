"""Strict validators of Hugging Face folders and PEFT folders, from their files alone: no tensor is loaded.

Layouts: transformers 5 (`config.json`, `generation_config.json`, `tokenizer.json`, safetensors with an index) and PEFT 0.21
(`adapter_config.json`, `adapter_model.safetensors`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.export.folders import link_tree
from nemo_rl_like.export.problems import Problem, read_object
from nemo_rl_like.model.hf_copy import StoredTensor, stored_tensors
from nemo_rl_like.model.hf_io import SINGLE, read_index
from nemo_rl_like.policy.store import ADAPTER_KIND
from nemo_rl_like.spec.policy import BottleneckSpec
from nemo_rl_like.tensors.shards import INDEX

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names."""
CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_PEFT_PREFIX = "base_model.model."
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hf_problems(folder: Path, at: str = "") -> list[Problem]:
    """What of a Hugging Face folder a server would stumble on; problems are told below the name `at`."""
    problems: list[Problem] = []
    config, found = read_object(folder / CONFIG, CONFIG)
    problems += found
    if config and not isinstance(config.get("model_type"), str):
        problems.append(Problem(CONFIG, "has no `model_type`; copy the model's own config.json"))
    if config and not config.get("architectures"):
        problems.append(Problem(CONFIG, "has no `architectures`, by which servers choose a model class; add them"))
    problems += _tokenizer_problems(folder, config.get("vocab_size"))
    problems += _generation_problems(folder, config.get("vocab_size"))
    problems += _weight_problems(folder)
    return _below(at, problems)


def peft_problems(folder: Path, at: str = "") -> list[Problem]:
    """What of a PEFT folder a server would stumble on; problems are told below the name `at`."""
    config, problems = read_object(folder / ADAPTER_CONFIG, ADAPTER_CONFIG)
    kind = config.get("peft_type")
    ours = config.get(ADAPTER_KIND) == BottleneckSpec().kind
    if config and not ours and kind not in ("LORA", "PROMPT_TUNING", "PREFIX_TUNING"):
        problems.append(
            Problem(ADAPTER_CONFIG, f"has `peft_type` {kind!r}, must be LORA, PROMPT_TUNING or PREFIX_TUNING")
        )
    if config and not config.get("base_model_name_or_path"):
        problems.append(Problem(ADAPTER_CONFIG, "has no `base_model_name_or_path`; name the base model's folder"))
    if not (folder / ADAPTER_FILE).is_file():
        problems.append(Problem(ADAPTER_FILE, "is missing; save the adapters with safe_serialization=True"))
        return _below(at, problems)
    try:
        tensors = stored_tensors(folder, ADAPTER_FILE)
    except InputError as error:
        return _below(at, [*problems, Problem(ADAPTER_FILE, _without_folder(error, folder))])
    if kind == "LORA":
        problems += _lora_problems(config, tensors)
    return _below(at, problems)


def link_adapters(source: Path, target: Path) -> None:
    """The two files of a PEFT folder that servers read; with a tokenizer beside them, some would take that for the base's."""
    link_tree(source, target, only=(ADAPTER_CONFIG, ADAPTER_FILE))


def _lora_problems(config: dict[str, Any], tensors: Iterable[StoredTensor]) -> list[Problem]:
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        return [Problem(ADAPTER_CONFIG, f"has `r` {rank!r}, must be the rank, 1 or more")]
    problems, names = [], [tensor.name for tensor in tensors]
    if not names:
        problems.append(Problem(ADAPTER_FILE, "holds no tensor; save the adapters again"))
    for tensor in tensors:
        if not tensor.name.startswith(_PEFT_PREFIX):
            problems.append(Problem(ADAPTER_FILE, f"tensor {tensor.name!r} does not begin with {_PEFT_PREFIX!r}"))
        if tensor.name.endswith("lora_A.weight"):
            pair = tensor.name.removesuffix("lora_A.weight") + "lora_B.weight"
            if pair not in names:
                problems.append(Problem(ADAPTER_FILE, f"tensor {tensor.name!r} has no lora_B beside it; save both"))
            if ".experts." not in tensor.name and tensor.shape[0] != rank:
                problems.append(
                    Problem(
                        ADAPTER_FILE, f"tensor {tensor.name!r} has rank {tensor.shape[0]}, the config's `r` is {rank}"
                    )
                )
    return problems


def _tokenizer_problems(folder: Path, vocab: object) -> list[Problem]:
    tokenizer, problems = read_object(folder / TOKENIZER, TOKENIZER)
    problems += read_object(folder / TOKENIZER_CONFIG, TOKENIZER_CONFIG)[1]
    ids = [entry.get("id") for entry in tokenizer.get("added_tokens") or ()]
    held = (tokenizer.get("model") or {}).get("vocab")
    if tokenizer and not held:
        problems.append(Problem(TOKENIZER, "has no vocabulary; copy the tokenizer's file again"))
    if isinstance(held, dict):
        ids += held.values()
    if isinstance(held, list):
        ids.append(len(held) - 1)
    largest = max((i for i in ids if isinstance(i, int)), default=-1)
    if isinstance(vocab, int) and largest >= vocab:
        problems.append(
            Problem(TOKENIZER, f"has the token id {largest}, and config.json's `vocab_size` is {vocab}; use the model's own tokenizer")
        )  # fmt: skip
    return problems


def _generation_problems(folder: Path, vocab: object) -> list[Problem]:
    generation, problems = read_object(folder / GENERATION, GENERATION)
    for name in _TOKEN_IDS:
        given = generation.get(name)
        for token in given if isinstance(given, list) else [] if given is None else [given]:
            if not isinstance(token, int) or token < 0 or (isinstance(vocab, int) and token >= vocab):
                problems.append(Problem(GENERATION, f"has `{name}` {token!r}, must be below `vocab_size` {vocab}"))
    if generation and generation.get("eos_token_id") is None:
        problems.append(Problem(GENERATION, "has no `eos_token_id`, so answers would not end; add the stop tokens"))
    return problems


def _weight_problems(folder: Path) -> list[Problem]:
    """The index, the shards that it names, and shards that it does not."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file() and single.is_file():
        return [Problem(SINGLE, f"stands beside {INDEX}, so two sets of weights are there; remove one")]
    if not index.is_file() and not single.is_file():
        return [Problem(".", f"has neither {SINGLE} nor {INDEX}; save the weights as safetensors")]
    try:
        tensors = stored_tensors(folder)
        listed = set(read_index(index).values()) if index.is_file() else {SINGLE}
        held = [name for file in sorted(listed) for name in (tensor.name for tensor in stored_tensors(folder, file))]
    except InputError as error:
        return [Problem(INDEX if index.is_file() else SINGLE, _without_folder(error, folder))]
    problems = [] if tensors else [Problem(SINGLE, "holds no tensor; save the weights again")]
    extra = sorted(set(held) - {tensor.name for tensor in tensors})
    if extra:
        problems.append(
            Problem(INDEX, f"does not list the tensor {extra[0]!r}, which a shard holds; write the index again")
        )
    on_disk = {file.name for file in folder.glob("*.safetensors")}
    problems += [
        Problem(name, f"is not in {INDEX if index.is_file() else SINGLE}; remove it")
        for name in sorted(on_disk - listed)
    ]
    counts = {match.group(2) for name in listed if (match := _SHARD.fullmatch(name))}
    if counts and counts != {f"{len(listed):05d}"}:
        problems.append(Problem(INDEX, f"names {len(listed)} shards that say they are of {'/'.join(sorted(counts))}"))
    return problems


def _without_folder(error: InputError, folder: Path) -> str:
    return str(error).replace(f"{folder}/", "")


def _below(at: str, problems: Iterable[Problem]) -> list[Problem]:
    if not at:
        return list(problems)
    return [Problem(at if p.path == "." else f"{at}/{p.path}", p.message) for p in problems]
