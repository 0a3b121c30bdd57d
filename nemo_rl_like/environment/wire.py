"""What goes between the framework and an environment process: JSON, never pickles, in length-prefixed frames."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nemo_rl_like.environment.types import JSON, EnvironmentContractError, Message, Reset, Step, Task, Tool, Unscorable

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Open:
    """Start episode `episode`; answered by a Reset."""

    episode: int
    task: Task
    seed: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Pass the model's message to the episode; answered by a Step."""

    episode: int
    message: Message


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the episode; answered by nothing."""

    episode: int


@dataclass(frozen=True, slots=True)
class Score:
    """Score a batch of single-turn answers; answered by a list of Step or Unscorable."""

    tasks: tuple[Task, ...]
    responses: tuple[str, ...]


Call = Open | Advance | Drop | Score
Answer = Reset | Step | list[Step | Unscorable] | None
_CALLS: dict[str, type[Call]] = {kind.__name__: kind for kind in (Open, Advance, Drop, Score)}


def encode_call(call: Call) -> bytes:
    """JSON of a call."""
    return json.dumps({"call": type(call).__name__, **asdict(call)}).encode()


def decode_call(frame: bytes) -> Call:
    """The call that `encode_call` wrote."""
    value = json.loads(frame)
    kind = _CALLS[value["call"]]
    if kind is Open:
        return Open(value["episode"], _task(value["task"]), value["seed"])
    if kind is Advance:
        return Advance(value["episode"], _message(value["message"]))
    if kind is Drop:
        return Drop(value["episode"])
    return Score(tuple(_task(t) for t in value["tasks"]), tuple(value["responses"]))


def encode_answer(answer: Answer | Unscorable | EnvironmentContractError) -> bytes:
    """JSON of an answer or failure."""
    return json.dumps(_answer_json(answer)).encode()


def decode_answer(frame: bytes) -> Answer:
    """The answer that `encode_answer` wrote. Raises the Unscorable or EnvironmentContractError that it wrote instead."""
    value = json.loads(frame)
    if "contract" in value:
        raise EnvironmentContractError(value["contract"])
    if "unscorable" in value:
        raise Unscorable(*value["unscorable"])
    if "reset" in value:
        return _reset(value["reset"])
    if "step" in value:
        return _step(value["step"])
    if "scores" in value:
        return [Unscorable(*s["unscorable"]) if "unscorable" in s else _step(s["step"]) for s in value["scores"]]
    return None


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame; None when the other end is gone."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_LENGTH.unpack(head)[0])
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None


def frame(payload: bytes) -> bytes:
    """A payload with its length before it."""
    return _LENGTH.pack(len(payload)) + payload


def _answer_json(answer: Answer | Unscorable | EnvironmentContractError) -> Mapping[str, JSON]:
    if isinstance(answer, EnvironmentContractError):
        return {"contract": str(answer)}
    if isinstance(answer, Unscorable):
        return {"unscorable": [answer.reason, answer.detail]}
    if isinstance(answer, Reset):
        return {"reset": asdict(answer)}
    if isinstance(answer, Step):
        return {"step": asdict(answer)}
    if answer is None:
        return {}
    return {"scores": [_answer_json(one) for one in answer]}


def _task(value: Mapping[str, Any]) -> Task:
    return Task(id=value["id"], data=value["data"])


def _message(value: Mapping[str, Any]) -> Message:
    return Message(value["role"], value["content"])


def _messages(values: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(_message(value) for value in values)


def _reset(value: Mapping[str, Any]) -> Reset:
    tools = tuple(Tool(t["name"], t["description"], t["parameters"]) for t in value["tools"])
    return Reset(messages=_messages(value["messages"]), tools=tools)


def _step(value: Mapping[str, Any]) -> Step:
    return Step(**{**value, "messages": _messages(value["messages"])})
