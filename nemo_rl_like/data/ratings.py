"""JSONL files that reward models learn from beside pairs: rated completions, and solutions whose steps are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.datasets import content_sha256, read_lines
from nemo_rl_like.data.messages import JSON, Message, assistant, user
from nemo_rl_like.data.preferences import Messages, PreferenceDataset, completion_of, fields_of, messages_of, plain
from nemo_rl_like.data.row_files import Line

RATED = '{"prompt": ..., "completion": ..., "score": 3.5}'
STEPWISE = '{"prompt": ..., "completions": ["a step", ...], "labels": [true, ...]}'


@dataclass(frozen=True, slots=True)
class Rated:
    """A prompt with one completion and what it is worth."""

    prompt: Messages
    completion: Messages
    score: float
    where: str
    """`file:line`, for messages to people."""


@dataclass(frozen=True, slots=True)
class Stepwise:
    """A prompt with a solution in steps, each judged."""

    prompt: Messages
    steps: tuple[str, ...]
    """At least one."""
    labels: tuple[float, ...]
    """[steps] probability that the step is right; 1 or 0 where the data say yes or no."""
    where: str
    """`file:line`, for messages to people."""

    def completion(self, separator: str) -> Messages:
        """The solution as one message."""
        return (assistant(separator.join(self.steps)),)


def load_rated(path: str | Path) -> PreferenceDataset[Rated]:
    """Read a file of rated completions. Raises InputError naming file, line, field and fix."""
    examples = tuple(_rated(line) for line in read_lines(path, f"like {RATED}"))
    rows: list[JSON] = [[plain(e.prompt), plain(e.completion), e.score] for e in examples]
    return PreferenceDataset(str(path), examples, content_sha256(rows))


def load_stepwise(path: str | Path, separator: str) -> PreferenceDataset[Stepwise]:
    """Read a file of judged steps; no step may contain `separator`. Raises InputError naming file, line, field and fix."""
    examples = tuple(_stepwise(line, separator) for line in read_lines(path, f"like {STEPWISE}"))
    rows: list[JSON] = [[plain(e.prompt), list(e.steps), list(e.labels)] for e in examples]
    return PreferenceDataset(str(path), examples, content_sha256(rows))


def _rated(line: Line) -> Rated:
    row = fields_of(line, ("prompt", "completion", "score"), RATED, "for pairs use `loss: pairwise`")
    prompt = messages_of(row["prompt"], user, line.where, "prompt")
    completion = messages_of(row["completion"], assistant, line.where, "completion")
    return Rated(
        prompt,
        completion_of(prompt, completion, line.where, "completion"),
        _score(row["score"], line.where),
        line.where,
    )


def _score(value: JSON, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InputError(f"{where}: score: is {value!r}, must be a number")
    return float(value)


def _stepwise(line: Line, separator: str) -> Stepwise:
    row = fields_of(line, ("prompt", "completions", "labels"), STEPWISE, "for pairs use `loss: pairwise`")
    prompt: tuple[Message, ...] = messages_of(row["prompt"], user, line.where, "prompt")
    steps, labels = _list(row["completions"], line.where, "completions"), _list(row["labels"], line.where, "labels")
    if len(steps) != len(labels):
        raise InputError(
            f"{line.where}: has {len(steps)} `completions` and {len(labels)} `labels`; give each step one label"
        )
    texts = tuple(_step(step, separator, f"{line.where}: completions[{i}]") for i, step in enumerate(steps))
    return Stepwise(
        prompt, texts, tuple(_label(v, f"{line.where}: labels[{i}]") for i, v in enumerate(labels)), line.where
    )


def _list(value: JSON, where: str, field: str) -> Sequence[JSON]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: {field}: is {value!r}, must be a list with at least one entry")
    return value


def _step(value: JSON, separator: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: is {value!r}, must be a text that is not empty")
    if separator in value:
        raise InputError(
            f"{where}: contains the separator {separator!r}, which ends a step; split it in two, or set another `loss.separator`"
        )
    return value


def _label(value: JSON, where: str) -> float:
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise InputError(f"{where}: is {value!r}, must be true, false or a number from 0 to 1")
    return float(value)
