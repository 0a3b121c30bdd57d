"""`nrl export check`: which bundle a folder holds, and what is wrong with it, by its files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.export.folders import file_problems
from nemo_rl_like.export.gguf_file import gguf_problems
from nemo_rl_like.export.hf_layout import ADAPTER_CONFIG, CONFIG, hf_problems, peft_problems
from nemo_rl_like.export.manifest import Manifest, hash_problems, read_manifest
from nemo_rl_like.export.nim import ADAPTERS, ENVIRONMENT, MODEL, nim_lora_problems, nim_problems
from nemo_rl_like.export.problems import Problem
from nemo_rl_like.export.quantized import QUANT_CONFIG, quantized_problems
from nemo_rl_like.export.triton import ADD_VENDOR_FILES, CONFIG_PBTXT, REPOSITORY
from nemo_rl_like.export.triton_layout import python_problems, trtllm_problems, vllm_problems


@dataclass(frozen=True, slots=True)
class BundleReport:
    """What a folder holds."""

    folder: Path
    kind: str
    """Target kind, as in the spec."""
    manifest: Manifest | None
    """None: it has none, so its contents are checked for their layout alone."""
    problems: tuple[Problem, ...]
    """What is wrong with it; empty if nothing is."""


def check_bundle(folder: Path) -> BundleReport:
    """Detect and validate the bundle in `folder`. Raises InputError if it is no folder, or holds nothing that is known."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder; give a bundle that `nrl export` wrote, or a Hugging Face or PEFT folder"
        )
    manifest, problems = read_manifest(folder)
    kind = manifest.kind if manifest is not None else _detected(folder)
    problems += file_problems(folder)
    if not problems:
        problems += layout_problems(folder, kind, _mounted_at(manifest))
        problems += [] if manifest is None else hash_problems(folder, manifest)
    return BundleReport(folder, kind, manifest, tuple(problems))


def layout_problems(folder: Path, kind: str, mounted_at: str | None) -> list[Problem]:
    """What a server of this kind would stumble on. Raises InputError for a kind that is not known."""
    match kind:
        case "hf":
            return hf_problems(folder)
        case "hf-lora":
            return peft_problems(folder)
        case "triton-python":
            return python_problems(folder)
        case "triton-vllm":
            return vllm_problems(folder, mounted_at)
        case "triton-trtllm":
            return trtllm_problems(folder, mounted_at)
        case "nim":
            return nim_problems(folder, mounted_at)
        case "nim-lora":
            return nim_lora_problems(folder, mounted_at)
        case "hf-quantized":
            return quantized_problems(folder)
        case "gguf":
            return gguf_problems(folder)
    raise InputError(
        f"{folder}: its manifest has the kind {kind!r}, which this version does not know; use the one that wrote it"
    )


def _mounted_at(manifest: Manifest | None) -> str | None:
    given = manifest.options.get("mounted_at") if manifest is not None else None
    return given if isinstance(given, str) else None


def _detected(folder: Path) -> str:
    """The kind of a bundle without a manifest, by what only it has."""
    if (folder / REPOSITORY).is_dir():
        if (folder / ADD_VENDOR_FILES).is_file():
            return "triton-trtllm"
        configs = (folder / REPOSITORY).glob(f"*/{CONFIG_PBTXT}")
        ours = any('"python"' in file.read_text(encoding="utf-8", errors="replace") for file in configs)
        return "triton-python" if ours else "triton-vllm"
    if (folder / ADAPTERS).is_dir():
        return "nim-lora"
    if (folder / ENVIRONMENT).is_file() or (folder / MODEL).is_dir():
        return "nim"
    if (folder / ADAPTER_CONFIG).is_file():
        return "hf-lora"
    if list(folder.glob("*.gguf")):
        return "gguf"
    if (folder / QUANT_CONFIG).is_file():
        return "hf-quantized"
    if (folder / CONFIG).is_file() or list(folder.glob("*.safetensors")):
        return "hf"
    raise InputError(
        f"{folder} is no bundle: it has neither {CONFIG}, {ADAPTER_CONFIG}, {REPOSITORY}/, {ENVIRONMENT} nor a .gguf file"
    )
