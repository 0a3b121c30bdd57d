"""Multi-turn environments for rollout tests; they run in real environment processes."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence

from nemo_rl_like.environment.types import (
    EnvironmentConfig,
    EnvironmentSource,
    Message,
    Reset,
    Step,
    Task,
    Unscorable,
    user,
)


class ChatterConfig(EnvironmentConfig):
    """Settings of `Chatter`."""

    delay_seed: int = 0
    """Answers take a random time of up to 20 ms that this seed changes; the answers stay the same."""
    turns: int = 4
    """Answers of the model before the episode ends."""
    fail_on: str = ""
    """Unscorable when the model says this."""
    die_on: str = ""
    """Kill the process when the model says this."""
    silent: bool = False
    """Never give a reward."""


class Chatter(EnvironmentSource[ChatterConfig]):
    """Answers each message with a number made of it; rewards its length."""

    config_model = ChatterConfig

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{i}", {"text": str(i)}) for i in range(8)]

    def make(self) -> ChatterEnvironment:
        return ChatterEnvironment(self.config)


class ChatterEnvironment:
    """One episode."""

    def __init__(self, config: ChatterConfig) -> None:
        self._config = config
        self._turn = 0

    async def reset(self, task: Task, seed: int) -> Reset:
        await self._dawdle(task.id)
        return Reset((user(f"{task.data['text']}={seed % 10}"),))

    async def step(self, message: Message) -> Step:
        self._turn += 1
        await self._dawdle(message.content)
        if self._config.fail_on and self._config.fail_on in message.content:
            raise Unscorable("planted")
        if self._config.die_on and self._config.die_on in message.content:
            os._exit(1)
        reward = None if self._config.silent else float(len(message.content))
        parts = {} if self._config.silent else {"length": float(len(message.content)), f"turn{self._turn}": 1.0}
        if self._turn == self._config.turns:
            return Step(reward=reward, rewards=parts, terminated=True, metrics={"said": 1.0})
        answer = int(hashlib.sha256(message.content.encode()).hexdigest(), 16) % 100
        return Step((user(f"+{answer}="),), reward=reward, rewards=parts, metrics={"said": 1.0})

    async def close(self) -> None:
        """Nothing is held."""

    async def _dawdle(self, text: str) -> None:
        digest = hashlib.sha256(f"{self._config.delay_seed}{text}{self._turn}".encode()).digest()
        await asyncio.sleep(digest[0] / 255 * 0.02)
