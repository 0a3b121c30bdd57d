"""Quantised Hugging Face folders by NVIDIA ModelOpt (`nvidia-modelopt`, not installed with this package), judged by what their files decode to.

Layout: ModelOpt's unified Hugging Face checkpoint, version 0.47 (`hf_quant_config.json`; FP8 with a scale a tensor, AWQ's INT4 in blocks of 128 input
channels), as vLLM, SGLang, TensorRT-LLM and NIM load it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.documents import load_documents
from nemo_rl_like.data.tokenizer import load_tokenizer
from nemo_rl_like.export.folders import copy_side_files
from nemo_rl_like.export.hf_layout import CONFIG, hf_problems
from nemo_rl_like.export.problems import BundleError, Problem, read_object
from nemo_rl_like.model import runtime
from nemo_rl_like.model.hf_copy import stored_tensors
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.spec.export import QuantizedTarget

QUANT_CONFIG, REPORT = "hf_quant_config.json", "quantization_report.json"
_CONFIGS = {"fp8": "FP8_DEFAULT_CFG", "int4-awq": "INT4_AWQ_CFG"}
_ALGORITHMS = {"fp8": "FP8", "int4-awq": "W4A16_AWQ"}
_BLOCK = 128
"""Input channels that share a scale in INT4."""


def check_quantized(hf: Path, target: QuantizedTarget) -> None:
    """Raise InputError for weights that have no such format, or text that cannot be read, before anything is written."""
    experts = [tensor.name for tensor in stored_tensors(hf) if ".experts." in tensor.name]
    if experts:
        raise InputError(
            f"target hf-quantized: {experts[0]} is an expert's, and what servers make of quantised experts is not known here; export it as hf"
        )
    wrong = [t for t in stored_tensors(hf) if _projects(t.name) and len(t.shape) == 2 and t.shape[1] % _BLOCK]
    if target.format == "int4-awq" and wrong:
        raise InputError(
            f"target hf-quantized: `format` is int4-awq, whose blocks have {_BLOCK} input channels, and {wrong[0].name} has "
            f"{wrong[0].shape[1]}; use fp8"
        )
    load_documents([target.calibration])


def write_quantized(hf: Path, folder: Path, target: QuantizedTarget) -> None:
    """Calibrate and quantise `hf` into `folder`.

    Raises BundleError if the distributions of what was written are further from the unquantised model's than `target.largest_kl`.
    """
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    rows = calibration_rows(hf, target)
    model = _model(hf)

    def forward(quantized: PreTrainedModel) -> None:
        for row in rows:
            quantized(input_ids=row)

    with torch.no_grad():
        wanted = [model(input_ids=row).logits[0].float().log_softmax(-1).cpu() for row in rows[:8]]
        quantization.quantize(model, vars(quantization)[_CONFIGS[target.format]], forward)
        export_hf_checkpoint(model, export_dir=folder)
    del model
    quantization_config = json.loads((folder / CONFIG).read_bytes())["quantization_config"]
    copy_side_files(hf, folder)
    config = {**json.loads((hf / CONFIG).read_bytes()), "quantization_config": quantization_config}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    kl = mean_kl(hf, folder, target, rows[:8], wanted)
    if not kl <= target.largest_kl:
        raise BundleError(
            f"{folder}: quantised to {target.format}, the model's next-token distributions have a mean KL of {kl:.4g} nats from the "
            f"unquantised ones, and `largest_kl` is {target.largest_kl}; calibrate on more text, or raise it"
        )
    said = {"format": target.format, "mean_kl_nats": kl, "tokens": sum(len(row) for row in wanted)}
    (folder / REPORT).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def mean_kl(hf: Path, folder: Path, target: QuantizedTarget, rows: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Mean KL, in nats a token, of plain transformers on the decoded files from log-probs [T, V] of each row by the model that they were made of."""
    model = _model(hf)
    parameters = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in decoded(folder, target):
            parameters[name].copy_(tensor)
        found = [model(input_ids=row).logits[0].float().log_softmax(-1).cpu() for row in rows]
    values = [(p.exp() * (p - q)).sum(-1) for p, q in zip(wanted, found, strict=True)]
    return float(torch.cat(values).mean())


def decoded(folder: Path, target: QuantizedTarget) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a quantised folder by name, as the float32 matrix or vector that a server computes with."""
    with SafetensorsReader(folder) as reader:
        names = set(reader.keys())
        for name in sorted(names):
            if not name.endswith(("_scale", "_scale_2")):
                stem = name.removesuffix("weight")
                scale = reader.get(f"{stem}weight_scale").float() if f"{stem}weight_scale" in names else None
                before = reader.get(f"{stem}pre_quant_scale").float() if f"{stem}pre_quant_scale" in names else None
                yield name, _decode(reader.get(name), scale, before)


def _decode(stored: Tensor, scale: Tensor | None, before: Tensor | None) -> Tensor:
    """[out, in]: values times scales, and times what the input is multiplied with before the product."""
    if scale is None:
        return stored.float()
    if stored.dtype == torch.uint8:
        halves = torch.stack([stored & 15, stored >> 4], 1).reshape(-1, stored.shape[1]).float()
        values = torch.where(halves > 7, halves - 16, halves) * scale.repeat_interleave(_BLOCK, 1)
    else:
        values = stored.float() * scale
    return values if before is None else values * before


def calibration_rows(hf: Path, target: QuantizedTarget) -> list[Tensor]:
    """Rows [1, n] of token ids: the first `samples` documents, each cut to `sample_tokens`. Raises InputError if none has two tokens."""
    tokenizer = load_tokenizer(hf)
    texts = load_documents([target.calibration]).texts[: target.samples]
    ids = [tokenizer(text, add_special_tokens=False).input_ids[: target.sample_tokens] for text in texts]
    rows = [torch.tensor([row], device=runtime.device()) for row in ids if len(row) > 1]
    if not rows:
        raise InputError(
            f"target hf-quantized: `calibration` is {target.calibration!r}, and no document has two tokens; give text"
        )
    return rows


def quantized_problems(folder: Path) -> list[Problem]:
    """What a server would stumble on in a quantised folder."""
    said, problems = read_object(folder / QUANT_CONFIG, QUANT_CONFIG)
    config = read_object(folder / CONFIG, CONFIG)[0]
    quantization = said.get("quantization")
    algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
    if said and algorithm not in _ALGORITHMS.values():
        problems.append(
            Problem(QUANT_CONFIG, f"has `quant_algo` {algorithm!r}, must be one of {', '.join(_ALGORITHMS.values())}")
        )
    if config and "quantization_config" not in config:
        problems.append(
            Problem(CONFIG, "has no `quantization_config`, so servers would read bytes as weights; export again")
        )
    return problems + hf_problems(folder)


def _projects(name: str) -> bool:
    return name.endswith("_proj.weight")


def _model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype="auto", local_files_only=True, trust_remote_code=False
    )
    return model.eval().to(runtime.device())
