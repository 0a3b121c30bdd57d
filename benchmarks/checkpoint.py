"""How long a save holds training up: at once, in the background, and beside the bare copy of the same bytes.

`python benchmarks/checkpoint.py --model models/smollm2-135m --out benchmarks/results/checkpoint.json`

One rank, float32, weights and AdamW's moments (12 bytes a parameter). `copy`: every parameter and moment copied into memory that is
there already. `background`: from the start of the save until training may go on, `CheckpointWriter.begin` included; what then is written
is waited for before the next round. `at_once`: until the checkpoint is written. Medians of alternating rounds after one that is not counted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peer import one_rank, provenance, write_json

from nemo_rl_like.checkpoint.layout import SECTIONS, ModelIdentity
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.model import runtime
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import PolicySpec

LIMIT = 1.05
"""Longest `background` over `copy`."""


def main() -> int:
    """Time the rounds, write the JSON; 1 if training waited longer than the limit."""
    options = _options()
    torch.set_num_threads(options.threads)
    runtime.keep_freed_memory()
    rank = PolicyRank(one_rank(options.threads), folder=str(options.model), policy=PolicySpec(), dtype="float32")
    rank.start_training(AdamWOptimizer(lr=1e-6), 1000)
    _step(rank)
    scratch = Path(tempfile.mkdtemp(dir=options.scratch))
    try:
        parts: dict[str, Callable[[], float]] = {
            "copy": _copier(rank),
            "background": lambda: _background(rank, scratch),
            "at_once": lambda: _at_once(rank, scratch),
        }
        rounds = [{name: part() for name, part in parts.items()} for _ in range(options.rounds + 1)][1:]
    finally:
        rank.close()
        shutil.rmtree(scratch)
    medians = {name: statistics.median(times[name] for times in rounds) for name in parts}
    ratios = [times["background"] / times["copy"] for times in rounds]
    result = {
        "what": f"seconds that training waits for a save of {_bytes(rank)} bytes",
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "background_over_copy": {"median": round(statistics.median(ratios), 3), "limit": LIMIT},
        "background_over_at_once": round(medians["background"] / medians["at_once"], 3),
        "rounds": options.rounds,
        "measured": provenance(options.threads),
    }
    write_json(options.out, result)
    print(result["seconds"], result["background_over_copy"])
    return int(statistics.median(ratios) > LIMIT)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="folder on the disk that is saved to; default: the system's")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoint.json"))
    return parser.parse_args()


def _step(rank: PolicyRank) -> None:
    """Give every moment its memory."""
    for parameter in rank.model.parameters():
        parameter.main_grad.fill_(1e-3)  # type: ignore[attr-defined]
    rank.backend.step()


def _tensors(rank: PolicyRank) -> list[torch.Tensor]:
    """What a save must copy: weights and moments."""
    slices = rank.backend.optimizer.slices()  # type: ignore[attr-defined]
    states = [state for _, states in slices for state in states.values()]
    return [*rank.model.parameters(), *(state for state in states if isinstance(state, torch.Tensor) and state.dim())]


def _bytes(rank: PolicyRank) -> int:
    return sum(tensor.nbytes for tensor in _tensors(rank))


def _copier(rank: PolicyRank) -> Callable[[], float]:
    tensors = [tensor.detach() for tensor in _tensors(rank)]
    room = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> float:
        began = time.perf_counter()
        for mine, tensor in zip(room, tensors, strict=True):
            mine.copy_(tensor)
        return time.perf_counter() - began

    return copy


def _writer(scratch: Path) -> CheckpointWriter:
    return CheckpointWriter(scratch, 1, ModelIdentity("benchmark", "benchmark"), SECTIONS)


def _background(rank: PolicyRank, scratch: Path) -> float:
    with _writer(scratch) as writer:
        began = time.perf_counter()
        rank.begin_save(str(writer.begin()))
        waited = time.perf_counter() - began
        rank._background.written().result()
    return waited


def _at_once(rank: PolicyRank, scratch: Path) -> float:
    with _writer(scratch) as writer:
        began = time.perf_counter()
        rank.save(str(writer.begin()))
        return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
