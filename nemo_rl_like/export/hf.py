"""The Hugging Face folder and the PEFT folder of a checkpoint: copied byte by byte in bounded memory, and compared with the checkpoint."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, uint8

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.checkpoint.shards import disk_full_named
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import load_tokenizer
from nemo_rl_like.export.folders import copy_side_files
from nemo_rl_like.export.hf_layout import ADAPTER_CONFIG, ADAPTER_FILE, CONFIG, GENERATION, TOKENIZER
from nemo_rl_like.export.problems import Problem, require_none
from nemo_rl_like.model import lora_stacked, prefix
from nemo_rl_like.model.hf_copy import StoredTensor, copy_weights, pieces, stored_tensors
from nemo_rl_like.model.hf_io import SafetensorsReader, copy_tokenizer
from nemo_rl_like.model.virtual_tokens import PROMPT
from nemo_rl_like.model.weight_entries import PREFIX
from nemo_rl_like.policy.store import BASE_ADAPTER

_GIB = 1 << 30


def copy_model(source: Path, folder: Path, shard_gib: float) -> None:
    """Write weights and side files of `source` into `folder`, and compare the weights.

    Raises InputError for damaged weights, BundleError if a tensor differs.
    """
    with disk_full_named(folder, "the export"):
        copy_weights(source, folder, int(shard_gib * _GIB))
    copy_side_files(source, folder)  # its own config.json, with the special tokens' ids
    if (folder / TOKENIZER).is_file():
        write_stops(folder)
    require_none(weight_differences(source, folder), folder)


def weight_differences(source: Path, folder: Path) -> list[Problem]:
    """Tensors that one folder has and the other lacks, or whose type, shape or bytes differ; a few megabytes in memory."""
    ours = {tensor.name: tensor for tensor in stored_tensors(source)}
    theirs = {tensor.name: tensor for tensor in stored_tensors(folder)}
    problems = [Problem(name, "is in the checkpoint and not in the export") for name in sorted(ours.keys() - theirs)]
    problems += [Problem(name, "is in the export and not in the checkpoint") for name in sorted(theirs.keys() - ours)]
    for name in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[name], theirs[name]
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            said = f"{other.dtype} {list(other.shape)}, the checkpoint's {mine.dtype} {list(mine.shape)}"
            problems.append(Problem(name, f"is {said}"))
        elif not _same_bytes(mine, other):
            problems.append(Problem(name, "has other bytes than the checkpoint's"))
    return problems


def _same_bytes(mine: StoredTensor, other: StoredTensor) -> bool:
    return all(a == b for a, b in zip(pieces(mine), pieces(other), strict=True))


def write_stops(folder: Path) -> None:
    """Say in generation_config.json every token that ends an answer: those of the file, of config.json, and the chat template's own.

    A server stops where the trainer's engine did. Ids that the vocabulary does not have, as configurations' defaults may be, are left out: no
    answer has them. Other entries stay.
    """
    file = folder / GENERATION
    given = json.loads(file.read_bytes()) if file.is_file() else {}
    config = json.loads((folder / CONFIG).read_bytes())
    vocab = config.get("vocab_size", sys.maxsize)
    stops = {*_ids(given.get("eos_token_id")), *_ids(config.get("eos_token_id")), *trained_stops(folder)}
    for name in ("bos_token_id", "pad_token_id"):
        known = [token for token in (given.pop(name, None), config.get(name)) if token is not None and token < vocab]
        if known:
            given[name] = known[0]
    given.pop("eos_token_id", None)
    ends = sorted(token for token in stops if token < vocab)
    if ends:
        given["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    file.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")


def trained_stops(folder: Path) -> tuple[int, ...]:
    """Tokens that end an answer by the folder's tokenizer: its end token, and the chat template's own where it has one."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.chat_template:
        return Renderer(tokenizer, str(folder)).stop_ids
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def copy_adapters(checkpoint: Path, folder: Path) -> None:
    """Write the checkpoint's adapters into `folder` as PEFT does, with the tokenizer beside them; bottleneck adapters by names of their own.

    Raises InputError if it has none.
    """
    source = adapters_of(checkpoint)
    with SafetensorsReader(source) as reader:
        save_file(_as_peft(dict(_tensors(reader))), folder / ADAPTER_FILE, metadata={"format": "pt"})
    for file in sorted(source.glob("*.json")):
        shutil.copyfile(file, folder / file.name)
    copy_tokenizer(checkpoint / "weights", folder)


def adapters_of(checkpoint: Path) -> Path:
    """The folder of a checkpoint's adapters. Raises InputError if it has none, and if no folder holds the base that they belong to."""
    source = checkpoint / ADAPTER
    if not source.is_dir():
        raise InputError(
            f"{checkpoint} has no adapters: its run trained the whole model; leave `adapter` out, or train with `policy.lora` or `policy.adapter`"
        )
    said = json.loads((source / ADAPTER_CONFIG).read_bytes())
    if BASE_ADAPTER in said:
        base, merged = said["base_model_name_or_path"], said[BASE_ADAPTER]
        raise InputError(
            f"{source}: its adapters belong to {base} with {merged} merged (`model.adapter`), which no folder holds; export the whole model, or "
            f"train over `{shlex.join(('nrl', 'model', 'merge', base, merged, 'MERGED'))}` as `model.path`"
        )
    return source


def adapter_differences(checkpoint: Path, folder: Path) -> list[Problem]:
    """Adapters that one has and the other lacks, or whose bytes differ."""
    with SafetensorsReader(adapters_of(checkpoint)) as reader:
        ours = _as_peft(dict(_tensors(reader)))
    theirs = {tensor.name: tensor for tensor in stored_tensors(folder, ADAPTER_FILE)}
    problems = [
        Problem(name, "is in one of checkpoint and export alone") for name in sorted(ours.keys() ^ theirs.keys())
    ]
    for name in sorted(ours.keys() & theirs.keys()):
        held = ours[name].contiguous()
        if b"".join(pieces(theirs[name])) != held.reshape(-1).view(uint8).numpy().tobytes():
            problems.append(Problem(name, "has other bytes than the checkpoint's"))
    return problems


def _ids(given: object) -> list[int]:
    return [given] if isinstance(given, int) else [int(i) for i in given] if isinstance(given, list) else []


def _as_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT has the prefixes of all layers in one tensor, and adapters of stacked experts as matrices; all else as it is."""
    if any(name.startswith(PREFIX) for name in tensors):
        return {PROMPT: prefix.as_peft(dict(tensors))}
    return lora_stacked.as_peft(tensors)


def _tensors(reader: SafetensorsReader) -> Iterator[tuple[str, Tensor]]:
    for name in reader.keys():
        yield name, reader.get(name)
