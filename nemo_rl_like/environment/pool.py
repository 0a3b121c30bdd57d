"""Environments and graders in processes that can be killed, behind one async interface with deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeVar

from nemo_rl_like.environment.dispatch import Dispatcher
from nemo_rl_like.environment.process import EnvironmentProcess, ProcessEnded
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.environment.types import EnvironmentContractError, Message, Reset, Step, Task, Unscorable
from nemo_rl_like.environment.wire import Advance, Answer, Call, Drop, Open, Score
from nemo_rl_like.spec.environment import EnvironmentSpec

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
MAX_ISOLATED_FAILURES = 4
"""After so many processes lost to single answers of one batch, the batch's other unscored answers are given up."""
T = TypeVar("T")


class _Host(Protocol):
    async def call(self, call: Call, timeout_s: float) -> Answer: ...
    async def kill(self) -> None: ...


class _LocalHost:
    """Environments inside this process: a call that awaits can be cut off, one that blocks cannot."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._dispatcher = Dispatcher(resolve(spec))

    async def call(self, call: Call, timeout_s: float) -> Answer:
        try:
            return await asyncio.wait_for(self._dispatcher.call(call), timeout_s)
        except TimeoutError as error:
            raise Unscorable("timeout", f"no answer within {timeout_s:g} s") from error

    async def kill(self) -> None:
        """Nothing to kill."""


@dataclass(slots=True)
class _Slot:
    """One place in the pool: the host that sits there now, and the episodes that live on it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    host: _Host | None = None
    episodes: set[int] = field(default_factory=set)


class EnvironmentPool:
    """Runs the episodes of one source. Use it from one event loop, which must live as long as the pool.

    Episode e lives in slot e modulo the number of processes. When a call overruns `step_timeout_s` or its process dies, the process
    is replaced; the episode of that call fails with the cause, and the other episodes that lived there fail with reason
    `process_lost` at their next call.
    """

    def __init__(self, spec: EnvironmentSpec, *, extra_env: Mapping[str, str] | None = None) -> None:
        self._spec = spec
        self._extra_env = dict(extra_env or {})
        self._slots = [_Slot() for _ in range(max(1, spec.processes))]
        self.restarts = 0
        """Processes that were replaced so far."""
        self.failures: Counter[str] = Counter()
        """Calls and answers that failed so far, by reason."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start every process now. Raises InputError when the environment cannot be made."""
        await asyncio.gather(*(self._host(slot) for slot in self._slots))

    async def open(self, episode: int, task: Task, seed: int) -> Reset:
        """Start an episode under an id that is not in use. Raises Unscorable, EnvironmentContractError."""
        slot = self._slot(episode)
        async with slot.lock:
            await self._host(slot)
            slot.episodes.add(episode)
            return _expect(await self._call(slot, Open(episode, task, seed), episode), Reset)

    async def step(self, episode: int, message: Message) -> Step:
        """Pass on the model's message. Raises Unscorable, EnvironmentContractError."""
        slot = self._slot(episode)
        async with slot.lock:
            if episode not in slot.episodes:
                self.failures["process_lost"] += 1
                raise Unscorable(
                    "process_lost", "the process that held this episode was killed by another episode's call"
                )
            return _expect(await self._call(slot, Advance(episode, message), episode), Step)

    async def drop(self, episode: int) -> None:
        """Close an episode; does nothing if it is gone already, and logs a failure to close."""
        slot = self._slot(episode)
        async with slot.lock:
            if episode not in slot.episodes:
                return
            try:
                await self._call(slot, Drop(episode), episode)
            except Unscorable as error:
                log.warning("episode %d did not close: %s", episode, error)
            slot.episodes.discard(episode)

    async def score(self, tasks: Sequence[Task], responses: Sequence[str]) -> list[Step | Unscorable]:
        """Score single-turn answers, one batch a process. An answer whose scoring hangs, crashes or raises
        is found and is Unscorable; the others keep their scores.

        Raises EnvironmentContractError.
        """
        size = -(-len(tasks) // len(self._slots)) if tasks else 1
        starts = range(0, len(tasks), size)
        parts = [Score(tuple(tasks[i : i + size]), tuple(responses[i : i + size])) for i in starts]
        scored = await asyncio.gather(
            *(self._score_part(slot, part) for slot, part in zip(self._slots, parts, strict=False))
        )
        results = [result for part in scored for result in part]
        self.failures.update(result.reason for result in results if isinstance(result, Unscorable))
        return results

    async def aclose(self) -> None:
        """Kill every process."""
        for slot in self._slots:
            if slot.host is not None:
                await slot.host.kill()
                slot.host = None

    def _slot(self, episode: int) -> _Slot:
        return self._slots[episode % len(self._slots)]

    async def _host(self, slot: _Slot) -> _Host:
        if slot.host is None:
            slot.host = await self._new_host()
        return slot.host

    async def _new_host(self) -> _Host:
        if self._spec.processes == 0:
            return _LocalHost(self._spec)
        return await EnvironmentProcess.start(self._spec, extra_env=self._extra_env, timeout_s=START_TIMEOUT_S)

    async def _call(self, slot: _Slot, call: Call, episode: int) -> Answer:
        try:
            return await (await self._host(slot)).call(call, self._spec.step_timeout_s)
        except Unscorable as error:
            self.failures[error.reason] += 1
            if isinstance(error, ProcessEnded):
                self._lose(slot, error)
            else:
                log.debug("episode %d: %s", episode, error)
            raise

    async def _score_part(self, slot: _Slot, part: Score) -> list[Step | Unscorable]:
        async with slot.lock:
            whole = await self._try_score(slot, part)
            if not isinstance(whole, Unscorable):
                return whole
            if len(part.tasks) == 1:
                return [whole]
            return await self._score_singly(slot, part)

    async def _score_singly(self, slot: _Slot, part: Score) -> list[Step | Unscorable]:
        results: list[Step | Unscorable] = []
        lost = 0
        for task, response in zip(part.tasks, part.responses, strict=True):
            if lost == MAX_ISOLATED_FAILURES:
                results.append(
                    Unscorable("given_up", f"{lost} answers of this batch had already killed the scoring process")
                )
                continue
            one = await self._try_score(slot, Score((task,), (response,)))
            lost += isinstance(one, ProcessEnded)
            results.append(one if isinstance(one, Unscorable) else one[0])
        return results

    async def _try_score(self, slot: _Slot, part: Score) -> list[Step | Unscorable] | Unscorable:
        try:
            answer = await (await self._host(slot)).call(part, self._spec.step_timeout_s)
        except ProcessEnded as error:
            self._lose(slot, error)
            return error
        except Unscorable as error:
            return error
        return _expect(answer, list)

    def _lose(self, slot: _Slot, error: ProcessEnded) -> None:
        log.warning("environment process lost: %s", error)
        slot.host = None
        slot.episodes.clear()
        self.restarts += 1


def _expect(answer: Answer, kind: type[T]) -> T:
    if not isinstance(answer, kind):
        raise EnvironmentContractError(
            f"the environment process answered {type(answer).__name__}, expected {kind.__name__}"
        )
    return answer
