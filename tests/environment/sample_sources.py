"""Environments that behave badly on request; they run in real environment processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from nemo_rl_like.environment.types import (
    EnvironmentConfig,
    EnvironmentSource,
    Message,
    Reset,
    SingleTurnSource,
    Step,
    Task,
    Unscorable,
    user,
)


class NoSettings(EnvironmentConfig):
    """No settings."""


def misbehave(text: str) -> None:
    """Do what the text asks for."""
    if "hang" in text:
        while True:
            time.sleep(0.01)
    if "die" in text:
        os._exit(7)
    if "raise" in text:
        raise KeyError("planted")
    if "unscorable" in text:
        raise Unscorable("no_judge", "planted")
    if "print" in text:
        print("noise on standard output", flush=True)


def _tasks(split: str) -> list[Task]:
    return [Task(f"{split}-{i}", {"text": f"{split} {i}"}) for i in range(4)]


class BadGrader(SingleTurnSource[NoSettings]):
    """Scores the length of a response, or does what it asks for."""

    config_model = NoSettings

    def tasks(self, split: str) -> Sequence[Task]:
        return _tasks(split)

    def prompt(self, task: Task) -> Reset:
        return Reset((user(str(task.data["text"])),))

    async def score(self, tasks: Sequence[Task], responses: Sequence[str]) -> Sequence[Step | Unscorable]:
        for response in responses:
            misbehave(response)
        return [
            Unscorable("empty")
            if not r
            else Step(reward=float("nan") if r == "nan" else float(len(r)), terminated=True)
            for r in responses
        ]


class Echo(EnvironmentSource[NoSettings]):
    """Answers with what was said and how often, until `end`; or does what it is asked for."""

    config_model = NoSettings

    def tasks(self, split: str) -> Sequence[Task]:
        return _tasks(split)

    def make(self) -> EchoEnvironment:
        return EchoEnvironment()


class EchoEnvironment:
    """One episode of `Echo`."""

    def __init__(self) -> None:
        self._turn = 0

    async def reset(self, task: Task, seed: int) -> Reset:
        misbehave(str(task.data["text"]))
        return Reset((user(f"{task.data['text']} seed {seed}"),))

    async def step(self, message: Message) -> Step:
        self._turn += 1
        if message.content == "variables":
            return Step((user(" ".join(sorted(os.environ))),))
        if message.content == "wait":
            await asyncio.sleep(60)
        misbehave(message.content)
        if message.content == "end":
            return Step(reward=1.0, rewards={"turns": float(self._turn)}, terminated=True)
        return Step((user(f"{message.content} {self._turn}"),), reward=0.5)

    async def close(self) -> None:
        if self._turn == 99:
            raise RuntimeError("never")


class ShortList(BadGrader):
    """Returns one result too few."""

    async def score(self, tasks: Sequence[Task], responses: Sequence[str]) -> Sequence[Step | Unscorable]:
        return [Step(reward=0.0, terminated=True)] * (len(tasks) - 1)


class NotReady(BadGrader):
    """Cannot be made."""

    def __init__(self, config: NoSettings) -> None:
        print("the last words", flush=True)
        os._exit(3)


class NotASource:
    """Is no environment."""
