"""Runs an environment's code, in whichever process it is: turns calls into answers and the author's exceptions into failures."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.environment.types import (
    Environment,
    EnvironmentContractError,
    EnvironmentSource,
    Message,
    Reset,
    SingleTurnSource,
    Step,
    Task,
    Unscorable,
)
from nemo_rl_like.environment.wire import Advance, Answer, Call, Drop, Open

log = logging.getLogger(__name__)
T = TypeVar("T")


class Dispatcher:
    """Holds the live episodes of one source."""

    def __init__(self, source: EnvironmentSource[Any]) -> None:
        self._source = source
        self._live: dict[int, Environment] = {}

    async def call(self, call: Call) -> Answer:
        """Answer one call.

        Raises:
            Unscorable: the environment said so, or its code raised (reason `error`).
            EnvironmentContractError: it returned something that is not what the interface asks for.
        """
        if isinstance(call, Open):
            return await self._open(call.episode, call.task, call.seed)
        if isinstance(call, Advance):
            return await self._advance(call.episode, call.message)
        if isinstance(call, Drop):
            await self._drop(call.episode)
            return None
        return await self._score(call.tasks, call.responses)

    async def _open(self, episode: int, task: Task, seed: int) -> Reset:
        environment = self._source.make()
        self._live[episode] = environment
        reset = await _guarded(environment.reset(task, seed), f"reset of task {task.id}")
        if not isinstance(reset, Reset):
            raise EnvironmentContractError(f"`reset` returned {type(reset).__name__}, must return a Reset")
        if not reset.messages or reset.messages[-1].role == "assistant":
            raise EnvironmentContractError(
                f"task {task.id}: `reset` must return messages of which the last is not the assistant's"
            )
        return reset

    async def _advance(self, episode: int, message: Message) -> Step:
        step = await _guarded(self._live[episode].step(message), "step")
        if not isinstance(step, Step):
            raise EnvironmentContractError(f"`step` returned {type(step).__name__}, must return a Step")
        return _finite(step)

    async def _drop(self, episode: int) -> None:
        environment = self._live.pop(episode, None)
        if environment is not None:
            await _guarded(environment.close(), "close")

    async def _score(self, tasks: Sequence[Task], responses: Sequence[str]) -> list[Step | Unscorable]:
        if not isinstance(self._source, SingleTurnSource):
            raise EnvironmentContractError(
                f"{type(self._source).__name__} has episodes of several turns and cannot score a batch"
            )
        results = await _guarded(self._source.score(tasks, responses), "score")
        if len(results) != len(tasks):
            raise EnvironmentContractError(f"`score` returned {len(results)} results for {len(tasks)} answers")
        return [_checked(result) for result in results]


def _checked(result: Step | Unscorable) -> Step | Unscorable:
    if isinstance(result, Unscorable):
        return result
    if not isinstance(result, Step):
        raise EnvironmentContractError(
            f"`score` returned {type(result).__name__}, must return Step or Unscorable for each answer"
        )
    try:
        return _finite(result)
    except Unscorable as unscorable:
        return unscorable


def _finite(step: Step) -> Step:
    numbers = {**step.rewards, **({} if step.reward is None else {"reward": step.reward})}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise Unscorable("not_finite", f"{name} is {value}")
    return step


async def _guarded(work: Awaitable[T], what: str) -> T:
    try:
        return await work
    except (Unscorable, NrlError):
        raise
    except Exception as error:  # the boundary to the author's code: whatever it raises makes this episode invalid
        log.warning("environment: %s raised", what, exc_info=True)
        raise Unscorable("error", f"{what} raised {type(error).__name__}: {error}") from error
