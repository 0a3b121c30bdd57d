"""What is said: messages, tools and the JSON they carry. Standard library only, so that environments start fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]
"""A value that `json` can write."""

ROLES = ("system", "user", "assistant", "tool")
"""Roles a message may have."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """Who speaks: one of `ROLES`."""
    content: str
    """What is said, as text."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"message role is {self.role!r}, must be one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise TypeError(f"message content must be text, got {type(self.content).__name__}")


@dataclass(frozen=True, slots=True)
class WeightedMessage(Message):
    """An assistant message of supervised data whose tokens count otherwise than others do."""

    weight: float = 1.0
    """Multiplies the loss of each of its tokens, 0 or more; 0 = not trained."""


def weight_of(message: Message) -> float:
    """How much the message's tokens count in supervised training; 1 unless it says otherwise."""
    return message.weight if isinstance(message, WeightedMessage) else 1.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call, as chat templates show it."""

    name: str
    """Name the model calls."""
    description: str
    """What it does, for the model to read."""
    parameters: Mapping[str, JSON] = field(default_factory=dict)
    """JSON Schema of its arguments."""


def user(content: str) -> Message:
    """A message of the user."""
    return Message("user", content)


def assistant(content: str) -> Message:
    """A message of the model."""
    return Message("assistant", content)
