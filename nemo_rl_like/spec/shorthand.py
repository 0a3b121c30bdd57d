"""Choices written in short: `advantage: rloo` for `advantage: {kind: rloo}`, and a block without a `kind` for the usual one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.schema_walk import Schema, entry_of, kinds_of, resolved
from nemo_rl_like.spec.source import Node

KIND = "kind"


def with_blocks(node: Node, schema: Schema) -> Node:
    """`node`, written for `schema`, with `{kind: text}` in the place of every text that names a kind. Places stay."""
    return _walk(node, schema, schema, _block_of_text)


def with_kinds(node: Node, schema: Schema) -> Node:
    """`node`, written for `schema`, with the default's `kind` in every block that names none."""
    return _walk(node, schema, schema, _with_usual_kind)


def _walk(node: Node, schema: Schema, root: Schema, change: Callable[[Node, Schema], Node]) -> Node:
    field = resolved(schema, root)
    kinds = kinds_of(field)
    if kinds:
        node = change(node, field)
        kind = _text(node, KIND)
        field = resolved({"$ref": kinds[kind]}, root) if kind in kinds else {}
    if isinstance(node.value, dict):
        below = {key: _walk(value, entry_of(field, key, root), root, change) for key, value in node.value.items()}
        return Node(below, node.where)
    if isinstance(node.value, list):
        items = [_walk(value, entry_of(field, i, root), root, change) for i, value in enumerate(node.value)]
        return Node(items, node.where)
    return node


def _block_of_text(node: Node, field: Schema) -> Node:
    return Node({KIND: node}, node.where) if isinstance(node.value, str) else node


def _with_usual_kind(node: Node, field: Schema) -> Node:
    default: JSON = field.get("default")
    usual = default.get(KIND) if isinstance(default, Mapping) else None
    if not isinstance(usual, str) or not isinstance(node.value, dict) or KIND in node.value:
        return node
    if nearest(KIND, node.value) is not None:
        return node  # a mistyped `kind` is told as such
    return Node({KIND: Node(usual, node.where), **node.value}, node.where)


def _text(node: Node, key: str) -> str:
    found = node.value.get(key) if isinstance(node.value, dict) else None
    return found.value if found is not None and isinstance(found.value, str) else ""
