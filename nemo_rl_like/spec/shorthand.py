"""A choice written in short: `advantage: rloo` for `advantage: {kind: rloo}`, and a block without a `kind` for the default's."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.schema_walk import Schema, entry_of, kinds_of, resolved
from nemo_rl_like.spec.source import Node

KIND = "kind"


def expand(node: Node, schema: Schema, root: Schema) -> Node:
    """`node`, written for `schema` (a part of `root`), with every short choice written out. Places stay."""
    field = resolved(schema, root)
    kinds = kinds_of(field)
    if kinds:
        node = _with_kind(node, field)
        kind = _text(node, KIND)
        field = resolved({"$ref": kinds[kind]}, root) if kind in kinds else {}
    if isinstance(node.value, dict):
        below = {key: expand(value, entry_of(field, key, root), root) for key, value in node.value.items()}
        return Node(below, node.where)
    if isinstance(node.value, list):
        return Node([expand(value, entry_of(field, i, root), root) for i, value in enumerate(node.value)], node.where)
    return node


def _with_kind(node: Node, field: Schema) -> Node:
    """The block that a text or a block without a `kind` stands for."""
    if isinstance(node.value, str):
        return Node({KIND: node}, node.where)
    usual = _default_kind(field)
    if isinstance(node.value, dict) and usual and KIND not in node.value and nearest(KIND, node.value) is None:
        return Node({KIND: Node(usual, node.where), **node.value}, node.where)
    return node


def _default_kind(field: Schema) -> str | None:
    default: JSON = field.get("default")
    kind = default.get(KIND) if isinstance(default, Mapping) else None
    return kind if isinstance(kind, str) else None


def _text(node: Node, key: str) -> str:
    found = node.value.get(key) if isinstance(node.value, dict) else None
    return found.value if found is not None and isinstance(found.value, str) else ""
