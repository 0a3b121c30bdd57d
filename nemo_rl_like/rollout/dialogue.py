"""The environment's side of a wave: many episodes asked, answered or scored at once, results in the order of the questions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from nemo_rl_like.data.messages import Message
from nemo_rl_like.environment.pool import EnvironmentPool
from nemo_rl_like.environment.types import EnvironmentSource, Reset, SingleTurnSource, Step, Unscorable
from nemo_rl_like.rollout.live import Plan
from nemo_rl_like.rollout.loop import LoopThread

T = TypeVar("T")


class Dialogue(Protocol):
    """Answers for the episodes of a wave; a failure is a value, in the place of its episode."""

    def open(self, plans: Sequence[Plan]) -> list[Reset | Unscorable]:
        """Start episodes."""

    def step(self, turns: Sequence[tuple[Plan, Message]]) -> list[Step | Unscorable]:
        """Pass on the model's messages."""

    def drop(self, plans: Sequence[Plan]) -> None:
        """Let go of episodes that ended."""


class SingleTurnDialogue:
    """Prompts are read here; answers are scored in batches by the pool."""

    def __init__(self, source: SingleTurnSource[Any], pool: EnvironmentPool, loop: LoopThread) -> None:
        self._source = source
        self._pool = pool
        self._loop = loop

    def open(self, plans: Sequence[Plan]) -> list[Reset | Unscorable]:
        """The tasks' prompts."""
        return [self._source.prompt(plan.task) for plan in plans]

    def step(self, turns: Sequence[tuple[Plan, Message]]) -> list[Step | Unscorable]:
        """Score all answers with one call a process."""
        tasks = [plan.task for plan, _ in turns]
        return self._loop.run(self._pool.score(tasks, [message.content for _, message in turns]))

    def drop(self, plans: Sequence[Plan]) -> None:
        """Nothing is held."""


class MultiTurnDialogue:
    """Every episode has an environment in the pool."""

    def __init__(self, pool: EnvironmentPool, loop: LoopThread) -> None:
        self._pool = pool
        self._loop = loop

    def open(self, plans: Sequence[Plan]) -> list[Reset | Unscorable]:
        """Reset an environment for each."""
        return self._all([self._pool.open(p.episode_id, p.task, p.environment_seed) for p in plans])

    def step(self, turns: Sequence[tuple[Plan, Message]]) -> list[Step | Unscorable]:
        """One step of each."""
        return self._all([self._pool.step(plan.episode_id, message) for plan, message in turns])

    def drop(self, plans: Sequence[Plan]) -> None:
        """Close each."""
        self._all([self._pool.drop(plan.episode_id) for plan in plans])

    def _all(self, work: Sequence[Coroutine[None, None, T]]) -> list[T | Unscorable]:
        return self._loop.run(_gathered(work))


def dialogue_of(source: EnvironmentSource[Any], pool: EnvironmentPool, loop: LoopThread) -> Dialogue:
    """The dialogue that fits the source."""
    if isinstance(source, SingleTurnSource):
        return SingleTurnDialogue(source, pool, loop)
    return MultiTurnDialogue(pool, loop)


async def _gathered(work: Sequence[Coroutine[None, None, T]]) -> list[T | Unscorable]:
    return list(await asyncio.gather(*(_or_failure(one) for one in work)))


async def _or_failure(work: Coroutine[None, None, T]) -> T | Unscorable:
    try:
        return await work
    except Unscorable as failure:
        return failure
