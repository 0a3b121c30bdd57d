"""Spec values with the place that each was written at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Scalar: TypeAlias = None | bool | int | float | str
Plain: TypeAlias = Scalar | list["Plain"] | dict[str, "Plain"]
Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a value was written: a file and a line, or a command-line override."""

    source: str
    """File name, or the text of the override."""
    line: int | None = None
    """Line in the file, from 1; None on the command line."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place. Mappings and lists hold nodes; nodes are never changed in place."""

    value: Scalar | list[Node] | dict[str, Node]
    where: Position


def plain(node: Node) -> Plain:
    """The value without places."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def child(node: Node, key: str | int) -> Node | None:
    """The entry `key` of a mapping or list node; None where there is none."""
    if isinstance(node.value, dict):
        return node.value.get(str(key))
    if isinstance(node.value, list) and isinstance(key, int):
        return node.value[key] if 0 <= key < len(node.value) else None
    return None


def position_of(root: Node, path: Path) -> Position:
    """Place of the value at `path`, or of its nearest parent that was written."""
    node = root
    for key in path:
        below = child(node, key)
        if below is None:
            break
        node = below
    return node.where


def list_index(items: Sequence[Node], key: str) -> int | None:
    """Index of the list item that `key` means: a number, else the item called so, else the only one of this `kind`."""
    if key.isdigit():
        return int(key) if int(key) < len(items) else None
    for names in (item_names(items), [_text(item, "kind") for item in items]):
        if names.count(key) == 1:
            return names.index(key)
    return None


def item_names(items: Sequence[Node]) -> list[str]:
    """How the items of a list may be called in a dotted path."""
    return [_text(item, "name") or _text(item, "kind") or str(i) for i, item in enumerate(items)]


def dotted(root: Node, path: Path) -> str:
    """`path` as users write it: list items by name or kind."""
    parts: list[str] = []
    node: Node | None = root
    for key in path:
        if node is not None and isinstance(key, int) and isinstance(node.value, list):
            names = item_names(node.value)
            unique = key < len(names) and names.count(names[key]) == 1
            parts.append(names[key] if unique else str(key))
        else:
            parts.append(str(key))
        node = None if node is None else child(node, key)
    return ".".join(parts)


def _text(node: Node, field: str) -> str | None:
    found = child(node, field)
    return found.value if found is not None and isinstance(found.value, str) and found.value else None
