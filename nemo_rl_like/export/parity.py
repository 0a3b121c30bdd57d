"""Does an export mean what the trainer's model means? Asked in a process of its own before the export gets its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from nemo_rl_like.artifacts import control_group
from nemo_rl_like.artifacts.errors import InputError, NrlError
from nemo_rl_like.export.hf_layout import CONFIG
from nemo_rl_like.export.manifest import ParityRecord
from nemo_rl_like.export.problems import BundleError
from nemo_rl_like.model.hf_copy import stored_tensors

_BYTES_A_PARAMETER = 9
"""Plain transformers in float64, and what it keeps beside its weights."""
_BASE_BYTES = 2 << 30
"""Libraries, activations and logits."""
TASK, FOUND = "task.json", "found.json"
"""What the process is given and leaves."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the process compares."""

    checkpoint: str
    """The checkpoint's weights, as a Hugging Face folder."""
    export: str
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What it found."""

    reference: Literal["megatron", "transformers"]
    tokens: int
    max_logit_difference: float
    tolerance: float
    greedy_tokens: int
    greedy_ties: int
    problems: tuple[str, ...]


def prove(checkpoint: Path, export: Path, asked: Literal["auto", "full", "weights"], timeout_s: float) -> ParityRecord:
    """The proof that `asked` wants of a Hugging Face folder whose weights were already compared.

    Raises BundleError that lists what differs, InputError if a full proof is asked for and cannot be had, NrlError if it takes longer than
    `timeout_s` seconds.
    """
    if asked == "weights":
        return ParityRecord(level="weights", reason="asked for")
    reason = _obstacle(export)
    if reason and asked == "full":
        raise InputError(f"`parity` is full, and {reason}; set `parity: weights`, or export elsewhere")
    if reason:
        return ParityRecord(level="weights", reason=reason)
    found = compare(checkpoint, export, timeout_s)
    if found.problems:
        lines = [f"{export} does not compute what {checkpoint} does", *found.problems]
        raise BundleError("\n  ".join(lines))
    return ParityRecord(
        level="full",
        reference=found.reference,
        tokens=found.tokens,
        max_logit_difference=found.max_logit_difference,
        tolerance=found.tolerance,
        greedy_tokens=found.greedy_tokens,
        greedy_ties=found.greedy_ties,
    )


def compare(checkpoint: Path, export: Path, timeout_s: float) -> Found:
    """Run the comparison in a process of its own, on CPUs. Raises NrlError if it fails or takes longer than `timeout_s` seconds."""
    with tempfile.TemporaryDirectory(prefix="nrl-parity-") as scratch:
        task = Task(str(checkpoint.resolve()), str(export.resolve()))
        (Path(scratch) / TASK).write_text(json.dumps(asdict(task)), encoding="utf-8")
        command = [sys.executable, "-m", "nemo_rl_like.export.parity_process", scratch]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NrlError(
                f"the comparison of {export} with {checkpoint} did not end in {timeout_s:.0f} s; raise `parity_timeout_s`, or set `parity: weights`"
            ) from error
        if done.returncode != 0:
            raise NrlError(
                f"the comparison of {export} with {checkpoint} failed:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        raw = json.loads((Path(scratch) / FOUND).read_bytes())
        return Found(**{**raw, "problems": tuple(raw["problems"])})


def needed_bytes(folder: Path) -> int:
    """Estimate of the memory that a full proof of this folder takes."""
    return _BASE_BYTES + _BYTES_A_PARAMETER * sum(_count(tensor.shape) for tensor in stored_tensors(folder))


def _obstacle(export: Path) -> str:
    """Why a full proof cannot be had here; empty if it can."""
    architectures = json.loads((export / CONFIG).read_bytes()).get("architectures") or [""]
    if not str(architectures[0]).endswith(("ForCausalLM", "LMHeadModel")):
        return f"{architectures[0] or 'the model'} has no logits to compare"
    needed, free = needed_bytes(export), _free_bytes()
    if needed > free:
        return f"it takes about {needed / 2**30:.1f} GiB, and the host has {free / 2**30:.1f} GiB free"
    return ""


def _free_bytes() -> int:
    """Memory that this process may still take: the host's, and its control group's."""
    free, left = int(psutil.virtual_memory().available), control_group.memory_left()
    return free if left is None else min(free, left)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
