"""Blocks of a spec that a command line gives, checked and explained as those of a file are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.explain import explain
from nemo_rl_like.spec.problems import SpecProblems
from nemo_rl_like.spec.source import Node, Plain, Position, plain
from nemo_rl_like.spec.yaml_reader import read_yaml_text

Block = TypeVar("Block", bound=Spec)


def node_of(value: Plain, option: str) -> Node:
    """A value with the option that gave it as its place."""
    where = Position(option)
    if isinstance(value, dict):
        return Node({key: node_of(item, option) for key, item in value.items()}, where)
    if isinstance(value, list):
        return Node([node_of(item, option) for item in value], where)
    return Node(value, where)


def key_and_value(text: str, example: str) -> tuple[str, Node]:
    """KEY=VALUE, the value as a spec's YAML. Raises SpecError, with `example` for a text of another form."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SpecError(f"{text!r} is not of the form KEY=VALUE, for example {example}")
    return key, read_yaml_text(value, f"`{text}`", lines=False)


def block_of(kind: type[Block], fields: Mapping[str, Node]) -> Block:
    """The block that a command line gives. Raises SpecProblems naming for each problem the option, the nearest key or value, and what is allowed."""
    root = Node(dict(fields), Position("command line"))
    try:
        return kind.model_validate_json(json.dumps(plain(root)), strict=True)
    except ValidationError as error:
        raise SpecProblems(explain(error, root, kind.model_json_schema()), of="the command line") from None
