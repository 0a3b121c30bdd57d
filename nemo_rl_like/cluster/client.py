"""`GroupClient`: calls the services of a worker group; waits with deadlines and turns failures into one error.

A client can be sent to another worker (it keeps only actor handles), which then calls the group itself.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster import interrupt
from nemo_rl_like.cluster.errors import ClusterError, DeadlineExceeded, WorkerDied, WorkerFailed
from nemo_rl_like.cluster.last_words import exit_cause, read_log, tail
from nemo_rl_like.cluster.worker import Call, WorkerInfo

SETTLE_S = 5.0
"""Seconds that the other ranks get to end by themselves once one has failed."""
_STACK_DUMP_S = 5.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank as seen from outside."""

    actor: ActorHandle
    """Its `WorkerHost`."""
    info: WorkerInfo
    """Where it runs."""
    log_path: str
    """File with its output."""

    def log(self) -> str:
        """The end of what this process wrote."""
        return read_log(self.log_path, self.info.log_start)


@dataclass(frozen=True, slots=True)
class Pending(Sequence[ray.ObjectRef]):
    """A submitted call: one reference a rank, in rank order, not fetched."""

    what: str
    """Name of the call in errors."""
    ranks: tuple[int, ...]
    """Ranks that were called."""
    values: tuple[ray.ObjectRef, ...]
    """Reference to each rank's value."""
    done: tuple[ray.ObjectRef, ...]
    """Reference to an empty result that is there when the value is."""

    def ended(self) -> bool:
        """Whether every rank has ended the call, well or not."""
        ready, _ = ray.wait(list(self.done), num_returns=len(self.done), timeout=0)
        return len(ready) == len(self.done)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int -> reference, slice -> tuple
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)


class GroupClient:
    """Calls the services that a worker group hosts. Collective services want one caller at a time."""

    def __init__(self, name: str, workers: Sequence[Worker]) -> None:
        """`workers` in rank order."""
        self.name = name
        self.workers = tuple(workers)
        self._caller = uuid.uuid4().hex
        self._sequence = [0] * len(self.workers)
        self._lock = threading.Lock()
        self.failure: ClusterError | None = None

    def __reduce__(self) -> tuple[type[GroupClient], tuple[str, tuple[Worker, ...]]]:
        return GroupClient, (self.name, self.workers)

    def submit(
        self, service: str, method: str, *args: object, ranks: Sequence[int] | None = None, what: str = ""
    ) -> Pending:
        """Start `service.method(*args)` on every rank (or on `ranks`); object references in `args` are fetched there.

        Raises the group's first failure again when the group is broken.
        """
        if self.failure is not None:
            raise self.failure
        chosen = tuple(range(len(self.workers))) if ranks is None else tuple(ranks)
        with self._lock:
            results = [self._send(rank, service, method, args) for rank in chosen]
        name = what or f"{self.name}.{service}.{method}"
        return Pending(name, chosen, tuple(value for _, value in results), tuple(done for done, _ in results))

    def _send(
        self, rank: int, service: str, method: str, args: tuple[object, ...]
    ) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        call = Call(self._caller, self._sequence[rank], service, method, args)
        refs: tuple[ray.ObjectRef, ray.ObjectRef] = self.workers[rank].actor.call.options(num_returns=2).remote(call)
        self._sequence[rank] += 1
        return refs

    def call(
        self,
        service: str,
        method: str,
        *args: object,
        deadline_s: float,
        what: str = "",
        ranks: Sequence[int] | None = None,
    ) -> object:
        """Submit, wait for all ranks, and fetch the first rank's value. Errors as in `wait`."""
        pending = self.submit(service, method, *args, ranks=ranks, what=what)
        return self._fetched(pending, pending.values[:1], deadline_s)[0]

    def results(self, pending: Pending, *, deadline_s: float) -> list[object]:
        """Wait for all ranks, and fetch every rank's value, in rank order. Errors as in `wait`."""
        return self._fetched(pending, pending.values, deadline_s)

    def _fetched(self, pending: Pending, values: Sequence[ray.ObjectRef], deadline_s: float) -> list[object]:
        """Wait for all ranks, and fetch these of their values within the same deadline."""
        started = time.monotonic()
        self.wait(pending, deadline_s=deadline_s)
        left = max(1.0, deadline_s - (time.monotonic() - started))
        try:
            return list(ray.get(list(values), timeout=left))
        except GetTimeoutError as error:
            raise DeadlineExceeded(f"fetching the result of {pending.what}", deadline_s, ()) from error

    def wait(self, pending: Pending, *, deadline_s: float) -> None:
        """Wait until every rank has ended the call; fetch nothing.

        Raises WorkerDied if a worker's process ended, the service's own NrlError or else WorkerFailed if it raised,
        DeadlineExceeded when `deadline_s` seconds passed. Ranks that still run then are killed: nothing hangs.
        """
        running = dict(zip(pending.done, pending.ranks, strict=True))
        end = time.monotonic() + deadline_s
        while running:
            left = end - time.monotonic()
            ready, _ = ray.wait(list(running), num_returns=1, timeout=min(interrupt.POLL_S, max(0.0, left)))
            interrupt.check()
            if not ready and left > 0:
                continue
            if not ready:
                raise self._break(self._deadline_exceeded(pending.what, deadline_s, running))
            rank = running.pop(ready[0])
            failure = self._failure_of(ready[0], rank, pending.what)
            if failure is not None:
                raise self._settled(failure, running, pending.what)

    def _failure_of(self, done: ray.ObjectRef, rank: int, what: str) -> NrlError | None:
        worker = self.workers[rank]
        info = worker.info
        try:
            ray.get(done)
        except RayTaskError as error:
            if isinstance(error.cause, NrlError):
                return error.cause
            text = f"{type(error.cause).__name__}: {error.cause}"
            return WorkerFailed(self.name, rank, info.node, what, text, _plain(str(error)), tail(worker.log()))
        except RayActorError as error:
            log = worker.log()
            cause = exit_cause(log, _detail(error), node=info.node, oom_kills_before=info.oom_kills)
            return WorkerDied(self.name, rank, info.node, f"during {what}, process {info.pid} {cause}", tail(log))
        except RayError as error:  # an object was lost, a node failed
            text = f"{type(error).__name__}: {error}"
            return WorkerFailed(self.name, rank, info.node, what, text, "", tail(worker.log()))
        return None

    def _settled(self, first: NrlError, running: dict[ray.ObjectRef, int], what: str) -> NrlError:
        """The error to raise once the other ranks have ended or were killed: a death explains the other failures."""
        failures = [first]
        end = time.monotonic() + SETTLE_S
        while running and not isinstance(failures[-1], WorkerDied):
            ready, _ = ray.wait(list(running), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            failure = self._failure_of(ready[0], running.pop(ready[0]), what)
            if failure is not None:
                failures.append(failure)
        main = min(failures, key=_rank_of_cause)
        if running or isinstance(main, WorkerDied):
            return self._break(main)
        return main

    def _deadline_exceeded(self, what: str, seconds: float, running: dict[ray.ObjectRef, int]) -> DeadlineExceeded:
        ranks = sorted(running.values())
        dumps: list[ray.ObjectRef] = [self.workers[rank].actor.dump_stacks.remote() for rank in ranks]
        ray.wait(dumps, num_returns=len(dumps), timeout=_STACK_DUMP_S)
        return DeadlineExceeded(
            what, seconds, [self.describe(rank) for rank in ranks], tail(self.workers[ranks[0]].log())
        )

    def describe(self, rank: int) -> str:
        """Rank, process and node in words."""
        info = self.workers[rank].info
        return f"{self.name} rank {rank} (process {info.pid} on {info.node})"

    def kill(self) -> None:
        """End every worker at once."""
        for worker in self.workers:
            ray.kill(worker.actor, no_restart=True)

    def _break(self, failure: NrlError) -> NrlError:
        self.kill()
        stopped = f"worker group {self.name!r} was stopped after: {failure}"
        self.failure = failure if isinstance(failure, ClusterError) else ClusterError(stopped)
        return failure


def _detail(error: RayActorError) -> str:
    """Ray's text about a dead actor in one line, without its advice."""
    lines = [line.strip() for line in error.error_msg.splitlines()]
    skipped = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:", "The actor died unexpectedly")
    kept = [line for line in lines if line and not line.startswith(skipped)]
    return (" ".join(kept) or lines[0]).partition(" Some common causes include")[0]


def _plain(text: str) -> str:
    return _COLOUR.sub("", text)


def _rank_of_cause(failure: NrlError) -> int:
    """A death comes before an error of ours, which comes before a foreign exception (often a broken collective)."""
    if isinstance(failure, WorkerDied):
        return 0
    return 2 if isinstance(failure, WorkerFailed) else 1
