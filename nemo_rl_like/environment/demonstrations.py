"""An environment's right answers as conversations, for supervised training."""

from __future__ import annotations

import asyncio
from typing import Any

from nemo_rl_like.environment.types import EnvironmentSource, Message, Reset, SingleTurnSource, Task, assistant


def demonstration(source: EnvironmentSource[Any], task: Task, epoch: int) -> tuple[Message, ...]:
    """What the task asks, and the source's answer. Raises NoDemonstration. Call it outside any event loop."""
    answer = source.demonstration(task, epoch)
    reset = source.prompt(task) if isinstance(source, SingleTurnSource) else asyncio.run(_reset(source, task))
    return (*reset.messages, assistant(answer))


async def _reset(source: EnvironmentSource[Any], task: Task) -> Reset:
    environment = source.make()
    try:
        return await environment.reset(task, 0)
    finally:
        await environment.close()
