"""Files of conversations: read whole, checked line by line, hashed by content."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.content_split import split_by_content
from nemo_rl_like.data.foreign import FORMATS, as_conversation
from nemo_rl_like.data.messages import JSON, ROLES, Message, WeightedMessage
from nemo_rl_like.data.row_files import KINDS, Line, rows_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Example:
    """One line of a file."""

    messages: tuple[Message, ...]
    """The conversation."""
    fields: Mapping[str, JSON]
    """What else stands in the line, for example a label."""
    line: int
    """Line number in the file, from 1."""


@dataclass(frozen=True, slots=True)
class MessageDataset:
    """The examples of one file."""

    source: str
    """The file, for messages to people."""
    examples: tuple[Example, ...]
    """At least one, in the order of the file."""
    sha256: str
    """Hash of the examples' content and order; blank lines and JSON spacing do not change it."""


def load_messages(path: str | Path) -> MessageDataset:
    """Read a JSONL file of conversations.

    A line is `{"messages": [{"role", "content", "weight"?}, ...], ...}`, a list of `{"role", "content"}`, or one `{"role", "content", ...}`; or a row of
    another system (`data/foreign.py`), in any kind of file that `data/row_files.py` reads.

    Raises:
        InputError: the file cannot be read, a line is malformed (names file, line and field), or there is no example.
    """
    examples = tuple(_example(line) for line in read_lines(path, 'like {"messages": [{"role": "user", ...}]}'))
    rows: list[JSON] = [[[_said(m) for m in e.messages], dict(e.fields)] for e in examples]
    return MessageDataset(source=str(path), examples=examples, sha256=content_sha256(rows))


def read_lines(path: str | Path, looks: str) -> list[Line]:
    """The lines of a JSONL file that are not blank. `looks`: what a line is like, in words.

    Raises:
        InputError: the file cannot be read, a line is not JSON (names file and line), or there is none.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file}: no such file; give the path of a file ({KINDS}) with rows {looks}")
    lines = list(rows_of(file))
    if not lines:
        raise InputError(f"{file}: the dataset is empty; it needs at least one line {looks}")
    return lines


def content_sha256(rows: Iterable[JSON]) -> str:
    """Hash of what the rows say, and of their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def split_dataset(
    dataset: MessageDataset, fraction: float, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """(training, validation) examples, split by content: equal conversations stay on one side.

    `fraction` of the distinct conversations, rounded down, are held out; at least one is left for training.
    """
    return hold_out(dataset.examples, lambda example: conversation_key(example.messages), fraction, seed)


def hold_out(
    items: Sequence[T], key: Callable[[T], str], fraction: float, seed: int
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """(training, validation) items: `fraction` of the distinct keys, rounded down, are held out; at least one is left for training."""
    keys = [key(item) for item in items]
    distinct = sorted(set(keys))
    wanted = min(int(len(distinct) * fraction), len(distinct) - 1)
    held_keys = frozenset(split_by_content(distinct, lambda name: name, validation=0, test=wanted, seed=seed).test)
    held = tuple(item for item, name in zip(items, keys, strict=True) if name in held_keys)
    return tuple(item for item, name in zip(items, keys, strict=True) if name not in held_keys), held


def conversation_key(messages: Sequence[Message]) -> str:
    """Equal for equal conversations and only for these."""
    return json.dumps([[m.role, m.content] for m in messages], ensure_ascii=False)


def parse_conversation(
    value: JSON, where: str, *, weighted: bool = False
) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
    """Messages and further fields of one JSON row; `weighted`: with the messages' weights, where they have one.

    Raises InputError that starts with `where` and names the field.
    """
    if isinstance(value, list):
        return parse_messages(value, where, "", weighted=weighted), {}
    if not isinstance(value, dict):
        raise InputError(f"{where}: a row must be an object or a list of messages, got {type(value).__name__}")
    if "messages" in value:
        rows = value["messages"]
        if not isinstance(rows, list):
            raise InputError(f"{where}: messages: must be a list of {{role, content}}, got {type(rows).__name__}")
        return parse_messages(rows, where, "messages", weighted=weighted), {
            k: v for k, v in value.items() if k != "messages"
        }
    if "role" in value or "content" in value:
        return (_message(value, where, "", weighted),), {k: v for k, v in value.items() if k not in ("role", "content")}
    known = as_conversation(value, where)
    if known is not None:
        return parse_conversation(known, where, weighted=weighted)
    raise InputError(
        f"{where}: has neither `messages` nor `role` and `content`, and is no row of {FORMATS}; its keys are {sorted(value)}"
    )


def _said(message: Message) -> JSON:
    """What a message says, for the hash."""
    weight = [message.weight] if isinstance(message, WeightedMessage) else []
    return [message.role, message.content, *weight]


def _example(line: Line) -> Example:
    messages, fields = parse_conversation(line.value, line.where, weighted=True)
    return Example(messages=messages, fields=fields, line=line.number)


def parse_messages(rows: Sequence[JSON], where: str, field: str, *, weighted: bool = False) -> tuple[Message, ...]:
    """Messages of a JSON list that stands in `field`. Raises InputError that starts with `where` and names the field."""
    if not rows:
        raise InputError(f"{where}: {field or 'the list'}: has no message; it needs at least one")
    return tuple(_message(row, where, f"{field}[{i}]", weighted) for i, row in enumerate(rows))


def _message(row: JSON, where: str, field: str, weighted: bool) -> Message:
    prefix = f"{field}." if field else ""
    if not isinstance(row, dict):
        raise InputError(
            f"{where}: {field or 'the row'}: must be an object with role and content, got {type(row).__name__}"
        )
    role, content = row.get("role"), row.get("content")
    if role not in ROLES:
        raise InputError(f"{where}: {prefix}role: is {role!r}, must be one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise InputError(f"{where}: {prefix}content: must be text, got {type(content).__name__}")
    if not weighted or "weight" not in row:
        return Message(str(role), content)
    return WeightedMessage(str(role), content, _weight(row["weight"], str(role), f"{where}: {prefix}weight"))


def _weight(value: JSON, role: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(f"{where}: is {value!r}, must be a number of 0 or more; 0 leaves the message untrained")
    if role != "assistant":
        raise InputError(f"{where}: stands at a message of the {role}, but only the assistant's are trained; remove it")
    return float(value)
