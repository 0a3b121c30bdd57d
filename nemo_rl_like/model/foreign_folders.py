"""What a folder is that another trainer left and that is no Hugging Face model: where the model in it lies, or what makes one of it.

Layouts: verl 0.9.1 (`FSDPCheckpointManager.save_checkpoint`, `BaseModelMerger`), OpenRLHF 0.11.2 (`DeepspeedStrategy.save_model`, `save_ckpt`), NeMo RL of 2026
(`utils/native_checkpoint.py`, `examples/converters/`), PEFT 0.21.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_VERL_SHARD = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")
_VERL_MEGATRON, _VERL_LORA = "dist_ckpt", "lora_adapter"
_DEEPSPEED_STATES = "_model_states.pt"
_PICKLES = (".bin", ".pt", ".pth")
_DEPTH, _TOLD = 4, 4
MODEL_PATH = "model.path"
"""The field beside which `adapter` may stand."""
_PLAIN = re.compile(r"[\w./][\w./-]*", re.ASCII)
"""Text that YAML takes as it is."""


def require_model_folder(folder: Path, field: str, adapter: str | None = None) -> None:
    """Raise InputError, which starts with `field`, for a folder that is known to be something else than a Hugging Face model.

    `adapter`: adapters that the spec gives beside it.
    """
    if adapter is not None and _is_model(folder):
        return
    found = foreign_hint(folder, field)
    if found is not None:
        raise InputError(f"`{field}` is {str(folder)!r}, which {found}")


def foreign_hint(folder: Path, field: str) -> str | None:
    """What follows "this folder": what it is, and what to do in `field`. None: it is a model, or nothing that is known."""
    if _is_model(folder):
        return _base_beside_adapters(folder, field)
    return (
        _adapters(folder, field) or _models_below(folder) or _verl(folder) or _distributed(folder) or _deepspeed(folder) or _pickled(folder)
    )  # fmt: skip


def _is_model(folder: Path) -> bool:
    """A configuration and weights as safetensors."""
    if not (folder / _CONFIG).is_file():
        return False
    return any(not file.name.startswith("adapter_") for file in folder.glob("*.safetensors"))


def _base_beside_adapters(folder: Path, field: str) -> str | None:
    """verl's merger leaves the base in the target folder, and what was trained apart."""
    if not (folder / _VERL_LORA / _ADAPTER_CONFIG).is_file():
        return None
    return (
        f"holds a base model and, in {_VERL_LORA}/, adapters that were trained over it, as verl's merger leaves them; "
        f"move {_VERL_LORA}/ away to start from the base, or {_both(folder / _VERL_LORA, folder, field)}"
    )


def _adapters(folder: Path, field: str) -> str | None:
    file = folder / _ADAPTER_CONFIG
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"holds PEFT's {_ADAPTER_CONFIG}, which is not valid JSON: {error}; save the adapters again"
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    over = f"over {base!r}" if base else f"over a base that {_ADAPTER_CONFIG} does not name"
    return f"holds PEFT adapters {over}, no whole model; {_both(folder, base or 'BASE', field)}"


def _both(adapters: Path, base: Path | str, field: str) -> str:
    """What makes one model of adapters and base: two lines of the spec's `model` block, or a folder for other fields."""
    if field == MODEL_PATH:
        where = "" if Path(base).is_dir() else f" ({str(base)!r} is no folder here: give the one that has it)"
        return f"write both in the spec's `model` block{where}:\n  path: {_yaml(base)}\n  adapter: {_yaml(adapters)}"
    return f"merge them first (`{shlex.join(('nrl', 'model', 'merge', str(base), str(adapters), 'MERGED'))}`) and give MERGED"


def _yaml(value: Path | str) -> str:
    text = str(value)
    return text if "/" in text and _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _models_below(folder: Path) -> str | None:
    """verl's `huggingface/`, NeMo RL's `consolidated/`, a trainer's `checkpoint-500/`."""
    found = [below.relative_to(folder).as_posix() for below in _below(folder, _DEPTH) if _is_model(below)]
    if not found:
        return None
    if len(found) == 1:
        return f"holds the model in {found[0]}; give {str(folder / found[0])!r}"
    more = f" and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
    return f"holds models in {', '.join(found[:_TOLD])}{more}; give the folder of one of them"


def _verl(folder: Path) -> str | None:
    """Shards here, in the part of a step below, or beside the `huggingface/` that holds a configuration alone."""
    around = [folder.parent] if folder.name == "huggingface" else []
    for place in (folder, *around, *_below(folder, 2)):
        if any(_VERL_SHARD.fullmatch(file.name) for file in place.glob("model_world_size_*.pt")):
            kind, backend = "FSDP", "fsdp"
        elif (place / _VERL_MEGATRON).is_dir():
            kind, backend = "Megatron", "megatron"
        else:
            continue
        where = "holds" if place == folder else f"has no weights: {place} holds"
        return (
            f"{where} verl's {kind} shards, which are pickles; merge them (python -m verl.model_merger merge --backend {backend} --local_dir {place} --target_dir MERGED) "
            "and give MERGED, or have verl save `hf_model` too (actor.checkpoint.save_contents)"
        )
    return None


def _distributed(folder: Path) -> str | None:
    """A checkpoint of torch.distributed.checkpoint, in the layout of NeMo RL's steps."""
    for place in (folder, *_below(folder, 3)):
        if not (place / ".metadata").is_file() or not any(place.glob("*.distcp")):
            continue
        megatron = place.name.startswith("iter_")
        script, option = ("convert_megatron_to_hf.py", "megatron") if megatron else ("convert_dcp_to_hf.py", "dcp")
        where = "is" if place == folder else f"holds in {place.relative_to(folder)}"
        return (
            f"{where} a distributed checkpoint of PyTorch, as NeMo RL saves its policy; convert it (examples/converters/{script} --config STEP/config.yaml "
            f"--{option}-ckpt-path {place} --hf-ckpt-path CONVERTED) and give CONVERTED"
        )
    return None


def _deepspeed(folder: Path) -> str | None:
    for place in (folder, *_below(folder, 2)):
        if any(place.glob(f"*{_DEEPSPEED_STATES}")):
            where = "is" if place == folder else f"holds in {place.relative_to(folder)}"
            return (
                f"{where} a checkpoint of DeepSpeed, which is pickles; give the folder that OpenRLHF saved the model to (`--ckpt.output_dir`, or TAG_hf with `--ckpt.save_hf`), "
                "or make one with its zero_to_fp32.py --safe_serialization and the model's own config.json and tokenizer"
            )
    return None


def _pickled(folder: Path) -> str | None:
    """Weights of another format, as NeMo RL's older converters write them."""
    held = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES and "model" in file.name)
    if not held or not (folder / _CONFIG).is_file():
        return None
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"M.from_pretrained('{folder}').save_pretrained('SAFE'); T.from_pretrained('{folder}').save_pretrained('SAFE')"
    )
    return f'has its weights as pickles ({held[0]}), which are not read: they may run code; if you trust them, write safetensors (python -c "{code}") and give SAFE'


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Sub-folders down to a depth, each level in the order of names; links are not followed."""
    level = [folder]
    for _ in range(depth):
        level = [
            inner for outer in level for inner in sorted(outer.iterdir()) if inner.is_dir() and not inner.is_symlink()
        ]
        yield from level
