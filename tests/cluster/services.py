"""Small services for the cluster tests."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping

import ray
import torch
import torch.distributed as dist

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.client import GroupClient
from nemo_rl_like.cluster.context import RankContext


class Probe:
    """Answers questions about its process, and misbehaves on request."""

    def __init__(self, context: RankContext, start: int = 0) -> None:
        self.context = context
        self.start = start
        self.seen: list[int] = []

    def place(self) -> tuple[int, Mapping[str, int], int, str, int]:
        c = self.context
        return c.rank, c.axis_ranks, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS", ""), os.getpid()

    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text)
        os.write(2, b"native " + text.encode() + b"\n")
        logging.getLogger("probe").info("logged %s", text)

    def note(self, number: int, seconds: float = 0.0) -> list[int]:
        time.sleep(seconds)
        self.seen.append(number)
        return list(self.seen)

    async def note_async(self, number: int) -> int:
        await asyncio.sleep(0)
        return number + self.start

    def exit(self, rank: int) -> None:
        if self.context.rank == rank:
            print("about to exit", flush=True)
            os._exit(7)
        time.sleep(600)

    def kill(self, rank: int) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def crash(self, rank: int) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(600)

    def fail(self, rank: int) -> None:
        if self.context.rank == rank:
            raise ZeroDivisionError("seven by nothing")
        time.sleep(600)

    def refuse(self) -> None:
        raise InputError("`model.path` is wrong")

    def hang(self) -> None:
        time.sleep(600)


class Reader:
    """Uses another service of the same process."""

    def __init__(self, context: RankContext, start: int, probe: Probe) -> None:
        self.context, self.start, self.probe = context, start, probe

    def read(self) -> tuple[int, bool]:
        return self.start, self.probe.context.rank == self.context.rank


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
        print("closed")


class Producer:
    """Makes objects and calls another group."""

    def __init__(self, context: RankContext, other: GroupClient | None = None) -> None:
        self.other = other

    def make(self, size: int) -> tuple[ray.ObjectRef, int]:
        return ray.put({"x": torch.arange(size, dtype=torch.float32)}), size

    def ask(self, start: int) -> object:
        assert self.other is not None
        return self.other.call("probe", "note_async", start, deadline_s=30)


class Parent:
    """Starts a process that outlives its worker unless somebody ends it."""

    def __init__(self, context: RankContext) -> None:
        self.child = subprocess.Popen(["sleep", "3000"], start_new_session=True)

    def ping(self) -> bool:
        return self.child.poll() is None
