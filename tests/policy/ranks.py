"""Runs a function on several gloo ranks at once: spawned processes, results by file, errors shown."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nemo_rl_like.checkpoint.layout import SECTIONS, ModelIdentity
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.cluster.context import RankContext, axis_ranks
from nemo_rl_like.export.hf import copy_adapters
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.policy import LayoutSpec
from tests.ports import free_port


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


def save_checkpoint(
    member: PolicyRank, root: Path, step: int, sections: Sequence[str] = SECTIONS, prefix: str = ""
) -> Path:
    """As a run does it: rank 0 begins and commits, every rank writes its share."""
    writer = CheckpointWriter(root, step, ModelIdentity("tiny", "tiny"), sections)
    told: list[Any] = [writer.begin() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, member.save(str(told[0]), prefix))
    if dist.get_rank() == 0:
        with writer:
            writer.commit({}, [shard for part in parts for shard in part])
    dist.barrier()
    return root / f"step_{step}"


def of_any_layout(metrics: dict[str, float]) -> dict[str, float]:
    """Those that must not depend on how rows are laid out over passes and ranks."""
    return {name: value for name, value in metrics.items() if not name.startswith("passes/")}


def state_of(member: PolicyRank) -> dict[str, torch.Tensor]:
    """The optimizer's whole state by `kind/name`, on every rank."""
    shares = member.backend.store._state(member.backend.optimizer)  # type: ignore[attr-defined]
    mine = {name: tensor.clone() for share in shares for name, tensor in share.tensors()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: tensor for part in parts for name, tensor in part.items()}


def context_of(layout: LayoutSpec, rank: int, world: int, port: int) -> RankContext:
    """What a worker group would tell this rank of a policy."""
    axes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    return RankContext(
        "policy", rank, world, axes, axis_ranks(rank, axes), "127.0.0.1", port, 1, Path("unused"), "node"
    )


def export_adapter(checkpoint: Path, target: Path) -> None:
    """The checkpoint's adapters in a new folder, as an export writes them."""
    target.mkdir()
    copy_adapters(checkpoint, target)
