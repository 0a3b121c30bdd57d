"""What each way to split a model over ranks costs: time of a training step, and bytes that a rank gives to collectives.

`python benchmarks/parallel_scaling.py --out benchmarks/results/parallel_scaling.json`

The same batch and model from scratch in every layout, float32, one thread a rank, gloo. `speedup` is the time of a step on one rank over that in
the layout, medians of `--steps` after two that are not counted, layouts of as many ranks as there are cores or fewer; with more ranks than cores
they only wait for each other, and there is no time. `sent_mib` is what the tensors given to collectives and sends weigh, in a step of rank 0: a
figure of the layout, not of the machine. `loss_difference` is the largest from one rank's losses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peer import provenance, write_json
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.cluster.context import RankContext, axis_ranks
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_experts import ExpertsConfig
from nemo_rl_like.model.layout_plan import named
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.policy.probe_rows import probe_batch
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch

DENSE = ModelConfig("llama", 4096, 256, 704, 8, 8, 8, 32, 2048, 10_000.0, 1e-5, False)
EXPERTS = replace(DENSE, family="qwen3_moe", experts=ExpertsConfig(count=8, per_token=2, width=176, normalize=True))
LAYOUTS: Mapping[str, tuple[ModelConfig, Sequence[LayoutSpec]]] = {
    "dense": (
        DENSE,
        (
            LayoutSpec(),
            LayoutSpec(dp=2),
            LayoutSpec(tp=2),
            LayoutSpec(tp=2, sp=True),
            LayoutSpec(pp=2),
            LayoutSpec(pp=2, vpp=2),
            LayoutSpec(cp=2),
            LayoutSpec(dp=4),
            LayoutSpec(dp=2, tp=2, sp=True),
            LayoutSpec(pp=2, dp=2),
        ),
    ),
    "experts": (
        EXPERTS,
        (
            LayoutSpec(),
            LayoutSpec(dp=2),
            LayoutSpec(dp=2, ep=2),
            LayoutSpec(tp=2, sp=True, ep=2, etp=1),
            LayoutSpec(dp=4, ep=4),
        ),
    ),
}
ROWS, LENGTH, PASS = 16, 256, 1024
"""Rows of a step, their tokens, and the budget of a pass: four passes on one rank."""
WARM_UP = 2


def main() -> int:
    """Run every layout, write the JSON; 1 if a layout's losses are not those of one rank."""
    options = _options()
    found = {model: _model(config, layouts, options) for model, (config, layouts) in LAYOUTS.items()}
    result = {
        "what": f"training steps of {ROWS} rows of {LENGTH} tokens in passes of {PASS}, one thread a rank",
        "parameters": {model: _parameters(config) for model, (config, _) in LAYOUTS.items()},
        "layouts": found,
        "steps": options.steps,
        "measured": provenance(1),
    }
    write_json(options.out, result)
    worst = max(figures["loss_difference"] for layouts in found.values() for figures in layouts.values())
    for model, layouts in found.items():
        for layout, figures in layouts.items():
            print(model, layout, figures)
    return int(worst > 1e-4)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/parallel_scaling.json"))
    return parser.parse_args()


def _model(config: ModelConfig, layouts: Sequence[LayoutSpec], options: argparse.Namespace) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    measured = [_layout(config, layout, options.steps) for layout in layouts]
    one = measured[0]
    out = {}
    for layout, got in zip(layouts, measured, strict=True):
        apart = max(abs(a - b) for a, b in zip(got["losses"], one["losses"], strict=True))
        out[named(layout)] = {
            "ranks": layout.ranks,
            "sent_mib": round(got["sent"] / (1 << 20), 2),
            "loss_difference": apart,
        }
        if layout.ranks <= cores:
            out[named(layout)]["speedup"] = round(one["seconds"] / got["seconds"], 3)
    return out


def _layout(config: ModelConfig, layout: LayoutSpec, steps: int) -> dict[str, Any]:
    """What rank 0 of the layout measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(config.to_hf_dict()))
        mp.spawn(_rank, (layout, port, folder, steps), layout.ranks)
        return dict(torch.load(folder / "measured.pt"))


def _rank(rank: int, layout: LayoutSpec, port: int, folder: Path, steps: int) -> None:
    axes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    place = axis_ranks(rank, axes)
    context = RankContext("policy", rank, layout.ranks, axes, place, "127.0.0.1", port, 1, folder / "unused", "node")
    policy = PolicySpec(layout=layout, rows="packed", micro_batch_tokens=PASS)
    this = PolicyRank(context, folder=str(folder), policy=policy, dtype="float32", initialize=7)
    this.start_training(AdamWOptimizer(lr=1e-4), 1000)
    batch = make_batch(ModelConfig.from_hf_folder(folder).vocab_size)
    losses, seconds = [], []
    for _ in range(WARM_UP + steps):
        dist.barrier()
        began = time.perf_counter()
        losses.append(this.train_step(batch, None, CrossEntropy())["loss"])
        seconds.append(time.perf_counter() - began)
    with _Sent() as sent:
        this.train_step(batch, None, CrossEntropy())
    if rank == 0:
        measured = {"losses": losses, "seconds": statistics.median(seconds[WARM_UP:]), "sent": sent.bytes}
        torch.save(measured, folder / "measured.pt")
    dist.barrier()


class _Sent(TorchDispatchMode):
    """Counts the bytes of the tensors that collectives and sends are given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not func.__name__.startswith(("recv", "barrier")):
            given = args[1] if func.__name__.startswith(_WITH_OUTPUT) else args[0]
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


_WITH_OUTPUT = ("allgather", "_allgather", "reduce_scatter", "_reduce_scatter", "alltoall", "gather", "scatter")
"""Operations whose first argument is what comes out, and whose second is what is given."""


def make_batch(vocabulary: int) -> TokenBatch:
    """Random rows, all trained but for the first token."""
    draw = torch.Generator().manual_seed(3)
    return probe_batch(torch.randint(0, vocabulary, (ROWS, LENGTH), generator=draw).tolist())


def _parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in WeightMap(config).hf_shapes().values())


if __name__ == "__main__":
    raise SystemExit(main())
