"""What of a target cannot be had of a model on this host: told before a pipeline starts, and again before anything is written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from nemo_rl_like.export.gguf_file import FAMILIES
from nemo_rl_like.export.hf_layout import ADAPTER_CONFIG, peft_problems
from nemo_rl_like.export.problems import Problem, read_object
from nemo_rl_like.export.triton import LORA_RANKS
from nemo_rl_like.model.outline import Outline
from nemo_rl_like.spec.export import (
    GgufTarget,
    NimLoraTarget,
    NimTarget,
    QuantizedTarget,
    TargetSpec,
    TritonTrtllmTarget,
    TritonVllmTarget,
)


def target_problems(target: TargetSpec, model: Outline) -> list[str]:
    """Each with the field, its value, the limit and the fix."""
    problems = []
    if isinstance(target, TritonVllmTarget | NimLoraTarget):
        problems += [p for name, folder in target.adapters.items() for p in _adapter(target.kind, name, folder)]
    if isinstance(target, QuantizedTarget):
        problems += _quantizer(target)
    if isinstance(target, GgufTarget) and model.family not in FAMILIES:
        problems.append(
            f"target gguf: the family {model.family} has no GGUF writer, only {', '.join(FAMILIES)} do; export it as hf"
        )
    limits = {
        "max_model_len": target.max_model_len if isinstance(target, TritonVllmTarget | NimTarget) else None,
        "max_seq_len": target.max_seq_len if isinstance(target, TritonTrtllmTarget) else None,
    }
    problems += [
        f"target {target.kind}: `{name}` is {asked}, and the model's context is {model.max_positions} tokens; lower it"
        for name, asked in limits.items()
        if asked is not None and asked > model.max_positions
    ]
    return problems


def _adapter(kind: str, name: str, folder: str) -> list[str]:
    """What is wrong with a PEFT folder that is to be served."""
    problems = peft_problems(Path(folder))
    config = read_object(Path(folder) / ADAPTER_CONFIG, "")[0]
    if config.get("peft_type", "LORA") != "LORA":
        problems.append(Problem(ADAPTER_CONFIG, "is no LoRA adapter, which is all that is served; leave it out"))
    if isinstance(config.get("r"), int) and config["r"] > LORA_RANKS[-1]:
        problems.append(Problem(ADAPTER_CONFIG, f"has rank {config['r']}, at most {LORA_RANKS[-1]} is served"))
    return [f"target {kind}: `adapters.{name}` is {folder!r}: {problem}" for problem in problems]


def _quantizer(target: QuantizedTarget) -> list[str]:
    problems = []
    if find_spec("modelopt") is None:
        problems.append(
            f"target hf-quantized ({target.format}) needs NVIDIA ModelOpt, which is not installed; pip install nvidia-modelopt"
        )
    if not Path(target.calibration).is_file():
        problems.append(
            f"target hf-quantized: `calibration` is {target.calibration!r}, which is no file; give text to calibrate on"
        )
    return problems
