"""Where each value of a resolved spec comes from: a line of a file, an override, or the field's default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.interpolate import escape
from nemo_rl_like.spec.loader import load_with_places
from nemo_rl_like.spec.source import Node, Path, child

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a resolved spec."""

    path: Path
    """Keys and list indices from the top."""
    value: JSON
    """A scalar, an empty block, or a list of scalars."""
    origin: str
    """`file:line`, the text of an override, or `default`."""


def values_with_origins(path: FilePath | str, overrides: Sequence[str] = ()) -> tuple[ExperimentSpec, list[Value]]:
    """The experiment of a spec file, and every value of it with its origin, in the order of the fields.

    Raises:
        SpecProblems: as `load_spec`.
    """
    spec, root = load_with_places(path, overrides)
    return spec, [
        Value(where, value, _origin(root, where)) for where, value in _leaves(spec.model_dump(mode="json"), ())
    ]


def as_yaml(values: Sequence[Value]) -> str:
    """The resolved spec as YAML that `load_spec` reads back, each value's origin in a comment behind it."""
    lines: list[tuple[str, str]] = []
    shown: Path = ()
    for value in values:
        shared = _shared(shown, value.path)
        for depth in range(shared, len(value.path) - 1):
            lines.append((_head(value.path, depth), ""))
        text = _head(value.path, len(value.path) - 1) + " " + escape(json.dumps(value.value, ensure_ascii=False))
        lines.append((text, value.origin))
        shown = value.path
    joined = _joined(lines)
    width = min(72, max(len(text) for text, origin in joined if origin))
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in joined)


def _leaves(value: JSON, path: Path) -> Iterator[tuple[Path, JSON]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for index, below in enumerate(value):
            yield from _leaves(below, (*path, index))
    else:
        yield path, value


def _origin(root: Node, path: Path) -> str:
    node = root
    for key in path:
        below = child(node, key)
        if below is None:
            return DEFAULT
        node = below
    return str(node.where)


def _shared(one: Path, other: Path) -> int:
    """Leading keys that two paths have in common, but not the last of `other`."""
    count = 0
    while count < min(len(one), len(other) - 1) and one[count] == other[count]:
        count += 1
    return count


def _head(path: Path, depth: int) -> str:
    """The line that opens `path[depth]`: indented by its depth, a list item as `-`."""
    key = path[depth]
    return "  " * depth + ("-" if isinstance(key, int) else f"{key}:")


def _joined(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """A list item's dash on the line of its first key."""
    out: list[tuple[str, str]] = []
    for text, origin in lines:
        if out and out[-1][0].endswith("-") and not out[-1][1]:
            before = out.pop()[0]
            text = before + " " + text[len(before) + 1 :]
        out.append((text, origin))
    return out
