"""Services for the cluster tests that use torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import ray
import torch
import torch.distributed as dist

from nemo_rl_like.cluster.client import GroupClient
from nemo_rl_like.cluster.context import RankContext


class Collective:
    """A gloo group over the ranks."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{context.master_addr}:{context.master_port}",
            rank=context.rank,
            world_size=context.world_size,
        )

    def threads(self) -> tuple[int, str]:
        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS", "")

    def total(self, batch: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        value = batch["x"].clone() * (self.context.rank + 1) * scale
        dist.all_reduce(value)
        return value

    def die_in(self, rank: int) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    def close(self) -> None:
        dist.destroy_process_group()


class Producer:
    """Makes objects and calls another group."""

    def __init__(self, context: RankContext, other: GroupClient | None = None) -> None:
        self.other = other

    def make(self, size: int) -> tuple[ray.ObjectRef, int]:
        return ray.put({"x": torch.arange(size, dtype=torch.float32)}), size

    def ask(self, start: int) -> object:
        assert self.other is not None
        return self.other.call("probe", "note_async", start, deadline_s=30)
