"""Dotted overrides from the command line: `stages.rl.steps=5`."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.secret_names import may_hold_secret
from nemo_rl_like.spec.source import Node, Position, item_names, list_index
from nemo_rl_like.spec.yaml_reader import read_yaml_text


def apply_overrides(root: Node, overrides: Sequence[str]) -> Node:
    """`root` with each `a.b.c=value` set, in order. Values are YAML; list items go by name, kind or index.

    Raises:
        SpecProblems: an override has no `=`, bad YAML, or a path that leads through something that is not a block.
    """
    problems: list[SpecProblem] = []
    for text in overrides:
        try:
            root = _apply(root, text)
        except SpecProblems as error:
            problems.extend(error.problems)
    if problems:
        raise SpecProblems(problems)
    return root


def _apply(root: Node, text: str) -> Node:
    key, equals, value = text.partition("=")
    where = Position(f"override `{key}=...`" if may_hold_secret(text) else f"override `{text}`")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        message = "is not of the form path.to.key=value, for example stages.rl.steps=5"
        raise SpecProblems([SpecProblem(where, "", message)])
    node = read_yaml_text(value, where.source, lines=False) if value.strip() else Node(None, where)
    return _set(root, parts, node, where, key.strip())


def _set(node: Node, parts: list[str], value: Node, where: Position, path: str) -> Node:
    """`node` with the value at `parts` replaced; missing blocks on the way are made."""
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(node.value, dict):
        below = node.value.get(head, Node({}, where))
        if below.value is None and rest:
            below = Node({}, where)
        return Node({**node.value, head: _set(below, rest, value, where, path)}, node.where)
    if isinstance(node.value, list):
        items = list(node.value)
        index = list_index(items, head)
        if index is None:
            raise SpecProblems([_no_item(items, head, where, path)])
        items[index] = _set(items[index], rest, value, where, path)
        return Node(items, node.where)
    shown = "text that may be a secret" if may_hold_secret(f"{path}={node.value}") else repr(node.value)
    message = f"`{head}` cannot be set below {shown}, which is not a block ({node.where})"
    raise SpecProblems([SpecProblem(where, path, message)])


def _no_item(items: Sequence[Node], head: str, where: Position, path: str) -> SpecProblem:
    names = item_names(items)
    message = f"no single list item is called `{head}`"
    return SpecProblem(where, path, message, allowed=f"{', '.join(names)}, or an index 0 to {len(items) - 1}")
