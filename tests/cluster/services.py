"""Small services for the cluster tests; without torch, so that a worker is up in a second."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext


class Probe:
    """Answers questions about its process, and misbehaves on request."""

    def __init__(self, context: RankContext, start: int = 0) -> None:
        self.context = context
        self.start = start
        self.seen: list[int] = []

    def place(self) -> tuple[int, Mapping[str, int], int]:
        return self.context.rank, self.context.axis_ranks, os.getpid()

    def pid(self) -> int:
        return os.getpid()

    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
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

    def close(self) -> None:
        sys.stdout.write("closed\n")


class Reader:
    """Uses another service of the same process."""

    def __init__(self, context: RankContext, start: int, probe: Probe) -> None:
        self.context, self.start, self.probe = context, start, probe

    def read(self) -> tuple[int, bool]:
        return self.start, self.probe.context.rank == self.context.rank


class Parent:
    """Has a process and a shared-memory segment that outlive its worker unless somebody ends them."""

    def __init__(self, context: RankContext) -> None:
        self.child = subprocess.Popen(["sleep", "3000"], start_new_session=True)
        self.segment = SharedMemory(create=True, size=4096)
        resource_tracker.unregister(f"/{self.segment.name}", "shared_memory")

    def ping(self) -> bool:
        return self.child.poll() is None
