"""Does a Hugging Face folder mean the same here? Logits against transformers, and a bit-equal round trip, at any TP, PP and EP."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError, NrlError
from nemo_rl_like.artifacts.ports import free_port
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.merged_reader import MergedReader, link_merged
from nemo_rl_like.model.outline import Outline
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import LayoutSpec

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

TINY_TOLERANCE = 1e-5
"""Largest logit difference that is always allowed."""
LARGEST_TOLERANCE = 5e-4
"""Largest logit difference that is ever allowed."""
LOGPROB_TOLERANCE = 5e-5
"""Largest mean log-prob difference."""
_ROWS, _LONGEST_ROW = 4, 48
TOKENS_FILE, LOGITS_FILE, EQUAL_FILE = "tokens.pt", "logits.pt", "round_trip.json"
"""What the check and its ranks leave for each other in a folder of their own."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `nrl model check` prints."""

    folder: str
    tp: int
    pp: int
    ep: int
    tokens: int
    """Random tokens compared."""
    max_abs_logit: float
    """Largest |logit| of the float64 Hugging Face run."""
    max_logit_diff: float
    """Largest |Megatron float32 - Hugging Face float32| logit."""
    mean_logprob_diff: float
    """Mean |Megatron float32 - Hugging Face float32| log-prob of the next token, in nats."""
    float64_error: float
    """Largest |Megatron float32 - Hugging Face float64| logit."""
    hf_float32_error: float
    """Largest |Hugging Face float32 - Hugging Face float64| logit."""
    tolerance: float
    """Largest `max_logit_diff` and `float64_error` that pass."""
    round_trip_equal: bool
    """Hugging Face -> Megatron -> Hugging Face gave every tensor back bit for bit."""
    unmapped_keys: tuple[str, ...]
    """Keys of the folder without a place in the model."""
    missing_keys: tuple[str, ...]
    """Keys that the model needs and the folder lacks."""
    seconds: float
    ok: bool

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2)


def check_folder(
    folder: str | Path,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    *,
    adapter: Path | None = None,
    seed: int = 0,
    timeout_s: float = 900.0,
) -> CheckReport:
    """Compare a Hugging Face folder as loaded here on tp * pp * ep ranks with transformers, on random tokens.

    `adapter`: a PEFT folder that is merged into it here, and that PEFT puts on the model there.

    Starts the ranks itself, as processes of its own that end before it returns. Passes if Megatron's float32 logits are no
    further from the float64 Hugging Face run than twice Hugging Face's own float32 logits (at least 1e-5, at most 5e-4), mean
    log-probs agree to 5e-5 nats, every key is covered and the round trip is bit-equal.
    Raises InputError for a folder, model or layout that cannot be used, NrlError if a rank fails or exceeds `timeout_s` seconds.
    """
    began = time.perf_counter()
    config = ModelConfig.from_hf_folder(folder)
    config.require_logits(str(folder))
    experts = config.experts is not None
    layout = LayoutSpec(tp=tp, pp=pp, dp=ep, ep=ep if experts else 1, sp=experts and tp > 1)
    if ep > 1 and not experts:
        raise InputError(f"ep is {ep}, but {folder} is a {config.family} model, which has no experts; leave ep out")
    config.check_layout(layout)
    tokens = random_rows(config, seed)
    with SafetensorsReader(folder) if adapter is None else MergedReader(Path(folder), adapter) as reader:
        coverage = WeightMap(config).coverage(reader.keys())
        if coverage.missing or coverage.unmapped:
            return _not_covered(
                folder, layout, tokens, coverage.unmapped, coverage.missing, time.perf_counter() - began
            )
        WeightMap(config).check(reader)
    ours, equal = _run_ranks(Path(folder), adapter, layout, tokens, timeout_s)
    exact, theirs = (_hugging_face(folder, adapter, tokens, dtype) for dtype in (torch.float64, torch.float32))
    hf_error = _largest(theirs, exact)
    tolerance = min(max(2 * hf_error, TINY_TOLERANCE), LARGEST_TOLERANCE)
    difference, error = _largest(ours, theirs), _largest(ours, exact)
    logprob = _mean_logprob_difference(ours, theirs, tokens)
    finite = all(math.isfinite(x) for x in (difference, error, logprob))
    # Two float32 runs each within their own rounding of the exact one may be this far apart.
    close = difference <= min(tolerance + hf_error, LARGEST_TOLERANCE) and error <= tolerance
    return CheckReport(
        folder=str(folder),
        tp=tp,
        pp=pp,
        ep=ep,
        tokens=sum(len(row) for row in tokens),
        max_abs_logit=max(float(x.abs().max()) for x in exact),
        max_logit_diff=difference,
        mean_logprob_diff=logprob,
        float64_error=error,
        hf_float32_error=hf_error,
        tolerance=tolerance,
        round_trip_equal=equal,
        unmapped_keys=coverage.unmapped,
        missing_keys=coverage.missing,
        seconds=time.perf_counter() - began,
        ok=bool(finite and close and logprob <= LOGPROB_TOLERANCE and equal),
    )


def random_rows(config: Outline, seed: int) -> list[list[int]]:
    """A few rows of random tokens, each shorter than the one before."""
    generator = torch.Generator().manual_seed(seed)
    longest = min(_LONGEST_ROW, config.max_positions)
    lengths = [max(1, longest - 7 * i) for i in range(_ROWS)]
    return [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def _hugging_face(
    folder: str | Path, adapter: Path | None, tokens: list[list[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Logits [row length, vocab] of each row."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    _choose_once(config)
    # Experts one after the other: transformers' grouped products know no float64. Attention too: its fused kernels leave out Gemma 2's cap.
    model = AutoModelForCausalLM.from_pretrained(
        str(folder),
        config=config,
        dtype=dtype,
        local_files_only=True,
        experts_implementation="eager",
        attn_implementation="eager",
        trust_remote_code=False,
    ).eval()
    if adapter is not None:
        model = _with_adapters(model, adapter)
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits[0] for row in tokens]


def _with_adapters(model: PreTrainedModel, adapter: Path) -> PeftModel:
    """The model with PEFT's own adapters beside it, in its type. Raises InputError without PEFT."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise InputError(
            "`--adapter` compares with PEFT, which is not installed; install it (`pip install peft`)"
        ) from error
    return PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False).to(model.dtype).eval()


def _choose_once(config: PretrainedConfig) -> None:
    """transformers takes longrope's short or long factors by the longest row of each pass; this package and vLLM by the model's context."""
    rope = config.rope_parameters or {}
    if (
        rope.get("rope_type") == "longrope"
        and config.max_position_embeddings > rope["original_max_position_embeddings"]
    ):
        rope["short_factor"] = rope["long_factor"]


def _run_ranks(
    folder: Path, adapter: Path | None, layout: LayoutSpec, tokens: list[list[int]], timeout_s: float
) -> tuple[list[Tensor], bool]:
    """Megatron's logits of each row, and whether the round trip was bit-equal."""
    with tempfile.TemporaryDirectory(prefix="nrl-check-") as scratch:
        torch.save(tokens, Path(scratch) / TOKENS_FILE)
        if adapter is not None:
            folder = _linked(folder, adapter, Path(scratch) / "model")
        _spawn(folder.resolve(), layout, Path(scratch), timeout_s)
        logits: list[Tensor] = torch.load(Path(scratch) / LOGITS_FILE, weights_only=True)
        equal = json.loads((Path(scratch) / EQUAL_FILE).read_text()) is True
    return logits, equal


def _linked(base: Path, adapter: Path, folder: Path) -> Path:
    """A folder of the base with the adapters merged."""
    folder.mkdir()
    shutil.copyfile(base / "config.json", folder / "config.json")
    link_merged(folder, base, adapter)
    return folder


def _spawn(folder: Path, layout: LayoutSpec, scratch: Path, timeout_s: float) -> None:
    world, port = layout.ranks, free_port("127.0.0.1")
    threads = max(1, (os.cpu_count() or 1) // world)
    processes = []
    deadline = time.monotonic() + timeout_s
    try:
        for rank in range(world):
            task = json.dumps(
                {
                    "folder": str(folder), "scratch": str(scratch), "rank": rank, "port": port,
                    "layout": layout.model_dump(), "threads": threads, "timeout_s": timeout_s,
                }
            )  # fmt: skip
            log = (scratch / f"rank{rank}.log").open("wb")
            command = [sys.executable, "-m", "nemo_rl_like.model.check_rank", task]
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_environment(threads)))
            log.close()
        _wait(processes, scratch, deadline, timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def _wait(processes: list[subprocess.Popen[bytes]], scratch: Path, deadline: float, timeout_s: float) -> None:
    """Until every rank has ended well; the first failure ends the wait."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0)), None)
        if failed is not None:
            tail = (scratch / f"rank{failed}.log").read_text(errors="replace")[-2000:]
            raise NrlError(
                f"rank {failed} of the model check ended with exit code {codes[failed]}; its last output:\n{tail}"
            )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise NrlError(f"the model check did not end in {timeout_s:.0f} s; ranks {running} were still running")
        time.sleep(0.05)


def _largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


def _mean_logprob_difference(ours: list[Tensor], theirs: list[Tensor], tokens: list[list[int]]) -> float:
    def logprobs(logits: list[Tensor]) -> Tensor:
        rows = [
            x[:-1].double().log_softmax(-1).gather(1, torch.tensor(row[1:], dtype=torch.int64)[:, None])[:, 0]
            for x, row in zip(logits, tokens, strict=True)
        ]
        return torch.cat(rows)

    difference = (logprobs(ours) - logprobs(theirs)).abs()
    return float(difference.mean()) if difference.numel() else 0.0


def _not_covered(
    folder: str | Path,
    layout: LayoutSpec,
    tokens: list[list[int]],
    unmapped: tuple[str, ...],
    missing: tuple[str, ...],
    seconds: float,
) -> CheckReport:
    nan = math.nan
    return CheckReport(
        str(folder), layout.tp, layout.pp, layout.ep, sum(len(row) for row in tokens), nan, nan, nan, nan, nan, nan, False,
        unmapped, missing, seconds, False,
    )  # fmt: skip
