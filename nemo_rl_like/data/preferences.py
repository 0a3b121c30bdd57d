"""JSONL files of preferences: pairs of completions, or single ones with a judgement; read whole, checked line by line, hashed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.datasets import content_sha256, parse_messages, read_lines
from nemo_rl_like.data.foreign import as_pair
from nemo_rl_like.data.messages import JSON, Message, assistant, user
from nemo_rl_like.data.row_files import Line

T = TypeVar("T")
PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}'
JUDGED = '{"prompt": ..., "completion": ..., "label": true}'
Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with a better and a worse completion."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    margin: float | None
    """By how much the chosen one is better, in any unit; None: not said."""
    where: str
    """`file:line`, for messages to people."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A prompt with one completion that is desirable or not."""

    prompt: Messages
    completion: Messages
    desirable: bool
    where: str
    """`file:line`, for messages to people."""


@dataclass(frozen=True, slots=True)
class PreferenceDataset(Generic[T]):
    """The examples of one file."""

    source: str
    """The file, for messages to people."""
    examples: tuple[T, ...]
    """At least one, in the order of the file."""
    sha256: str
    """Hash of the examples' content and order."""


def load_pairs(path: str | Path) -> PreferenceDataset[Pair]:
    """Read a file of pairs: texts or lists of messages.

    Without a `prompt`, `chosen` and `rejected` are whole conversations, and what they begin with alike is the prompt.
    Raises:
        InputError: names file, line, field and fix.
    """
    pairs = tuple(_pair(line) for line in read_lines(path, f"like {PAIR}"))
    without = [pair for pair in pairs if pair.margin is None]
    if without and len(without) < len(pairs):
        raise InputError(f"{without[0].where}: has no `margin`, but other lines have one; give every line one, or none")
    rows: list[JSON] = [[*map(plain, (p.prompt, p.chosen, p.rejected)), p.margin] for p in pairs]
    return PreferenceDataset(str(path), pairs, content_sha256(rows))


def load_judged(path: str | Path, *, unpair: bool = False) -> PreferenceDataset[Judged]:
    """Read a file of judged completions; with `unpair`, a file of pairs, each of which becomes a desirable and an undesirable one.

    Raises:
        InputError: names file, line, field and fix.
    """
    if unpair:
        pairs = load_pairs(path)
        return PreferenceDataset(pairs.source, unpaired(pairs.examples), pairs.sha256)
    examples = tuple(_judged(line) for line in read_lines(path, f"like {JUDGED}"))
    rows: list[JSON] = [[plain(e.prompt), plain(e.completion), e.desirable] for e in examples]
    return PreferenceDataset(str(path), examples, content_sha256(rows))


def unpaired(pairs: Sequence[Pair]) -> tuple[Judged, ...]:
    """Both completions of each pair, the chosen one first."""
    return tuple(
        Judged(pair.prompt, completion, desirable, pair.where)
        for pair in pairs
        for completion, desirable in ((pair.chosen, True), (pair.rejected, False))
    )


# -- one line


def _pair(line: Line) -> Pair:
    if isinstance(line.value, Mapping):
        line = replace(line, value=as_pair(line.value, line.where))
    row = fields_of(line, ("chosen", "rejected"), PAIR, "rows with `completion` and `label` are for `losses: [kto]`")
    sides = {name: messages_of(row[name], assistant, line.where, name) for name in ("chosen", "rejected")}
    if "prompt" in row:
        prompt = messages_of(row["prompt"], user, line.where, "prompt")
    else:
        prompt = _common_start(row, sides["chosen"], sides["rejected"], line.where)
    chosen, rejected = (completion_of(prompt, sides[name], line.where, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise InputError(f"{line.where}: `chosen` and `rejected` are equal, so nothing is preferred; remove the line")
    return Pair(prompt, chosen, rejected, _margin(row.get("margin"), line.where), line.where)


def _judged(line: Line) -> Judged:
    fix = "for pairs set `data.unpair: true`, or use a loss of pairs (`losses: [dpo]`)"
    row = fields_of(line, ("prompt", "completion", "label"), JUDGED, fix)
    prompt = messages_of(row["prompt"], user, line.where, "prompt")
    completion = messages_of(row["completion"], assistant, line.where, "completion")
    label = row["label"]
    if not isinstance(label, bool):
        raise InputError(f"{line.where}: label: is {label!r}, must be true (desirable) or false")
    return Judged(prompt, completion_of(prompt, completion, line.where, "completion"), label, line.where)


def fields_of(line: Line, names: Sequence[str], looks: str, fix: str) -> Mapping[str, JSON]:
    """The row as an object that has these fields."""
    row = line.value
    if not isinstance(row, Mapping):
        raise InputError(f"{line.where}: must be an object like {looks}, got {type(row).__name__}")
    missing = [name for name in names if name not in row]
    if missing:
        raise InputError(f"{line.where}: has no `{missing[0]}`, its keys are {sorted(row)}; write {looks}; {fix}")
    return row


def messages_of(value: JSON, said_by: Callable[[str], Message], where: str, field: str) -> Messages:
    """A text as one message, or a list of messages."""
    if isinstance(value, str):
        return (said_by(value),)
    if isinstance(value, Sequence):
        return parse_messages(value, where, field)
    raise InputError(f"{where}: {field}: must be text or a list of messages, got {type(value).__name__}")


def _common_start(row: Mapping[str, JSON], chosen: Messages, rejected: Messages, where: str) -> Messages:
    """The messages that both conversations begin with, never all of one."""
    if isinstance(row["chosen"], str) or isinstance(row["rejected"], str):
        raise InputError(f"{where}: has no `prompt`; give one, or write `chosen` and `rejected` as lists of messages")
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    if common == 0:
        raise InputError(
            f"{where}: `chosen` and `rejected` begin with different messages; give a `prompt`, or both whole"
        )
    return chosen[:common]


def completion_of(prompt: Messages, messages: Messages, where: str, field: str) -> Messages:
    """What the model is to say: `messages` without the prompt, if they begin with it."""
    rest = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    if not rest or rest[0].role != "assistant":
        role = f"begins with role {rest[0].role}" if rest else "ends with the prompt"
        raise InputError(
            f"{where}: {field}: {role}; a completion begins with an assistant message (leave `prompt` out where `chosen` and "
            "`rejected` are whole conversations)"
        )
    return rest


def _margin(value: JSON, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: margin: is {value!r}, must be a number")
    return float(value)


def plain(messages: Messages) -> JSON:
    return [[m.role, m.content] for m in messages]
