"""Runs a function on several gloo ranks at once: spawned processes, results by file, errors shown."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from nemo_rl_like.cluster.context import RankContext, axis_ranks
from nemo_rl_like.spec.policy import LayoutSpec


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(function: Callable[..., Any], world: int, tmp_path: Path, *args: Any, timeout_s: float = 240.0) -> Any:
    """Call `function(rank, world, port, *args)` on `world` processes; returns rank 0's result."""
    context = mp.get_context("spawn")
    port = free_port()
    out = tmp_path / "rank0.pt"
    errors = [tmp_path / f"error-{rank}.txt" for rank in range(world)]
    processes = [
        context.Process(target=_entry, args=(function, rank, world, port, out, errors[rank], args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    for process in processes:
        if process.is_alive():
            process.kill()
    told = "\n".join(e.read_text() for e in errors if e.exists())
    assert not told and out.exists(), told or f"ranks did not end in {timeout_s} s"
    return torch.load(out, weights_only=False)


def _entry(
    function: Callable[..., Any], rank: int, world: int, port: int, out: Path, error: Path, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        result = function(rank, world, port, *args)
        if rank == 0:
            torch.save(result, out.with_suffix(".tmp"))
            out.with_suffix(".tmp").rename(out)
    except BaseException:
        error.write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def context_of(layout: LayoutSpec, rank: int, world: int, port: int) -> RankContext:
    """What a worker group would tell this rank of a policy."""
    axes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    return RankContext(
        "policy", rank, world, axes, axis_ranks(rank, axes), "127.0.0.1", port, 1, Path("unused"), "node"
    )
