"""Reads YAML into nodes with line numbers. Values follow YAML 1.2's core schema, so `1e-6` is a number and `on` is text.

Refused, each with its line: duplicate keys, tags, merge keys, keys that are not text, several documents, recursive or
exploding aliases, and nesting or files beyond what a spec needs.
"""

from __future__ import annotations

import math
import re
from pathlib import Path as FilePath

import yaml
from yaml.events import CollectionStartEvent, ScalarEvent
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.source import Node, Position, Scalar

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NODES = 20_000

_STR = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_CORE_SCHEMA = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]{1,40}|[0-9]{1,40}(?:\.[0-9]{0,40})?)(?:[eE][-+]?[0-9]{1,3})?",
        list("-+0123456789."),
    ),
    (_MERGE, r"<<", ["<"]),
)


def install_core_schema(kind: type[yaml.resolver.BaseResolver]) -> None:
    """Give a PyYAML loader or dumper class YAML 1.2's rules for what a plain scalar means."""
    kind.yaml_implicit_resolvers = {}
    for tag, pattern, first in _CORE_SCHEMA:
        kind.add_implicit_resolver(tag, re.compile(rf"^(?:{pattern})$"), first)


class _Loader(yaml.SafeLoader):
    """Composes nodes only; refuses tags and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()
        if isinstance(event, ScalarEvent | CollectionStartEvent) and event.tag is not None:
            raise _refused(f"tag `{event.tag}` is not allowed; remove it", event)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refused(f"nested deeper than {MAX_DEPTH} levels; flatten it", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


install_core_schema(_Loader)


def _refused(message: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    mark = event.start_mark if isinstance(event.start_mark, yaml.Mark) else None
    return yaml.MarkedYAMLError(None, None, message, mark)


def read_yaml_file(path: FilePath) -> Node:
    """The content of a YAML file as nodes; an empty file is an empty mapping.

    Raises:
        SpecProblems: the file cannot be read, is not UTF-8 YAML, or holds something refused.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _problem(Position(name), f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise _problem(Position(name), f"is larger than the limit of {MAX_BYTES} bytes; is it a spec?")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _problem(
            Position(name, data[: error.start].count(b"\n") + 1), "is not UTF-8 text; save it as UTF-8"
        ) from error
    return read_yaml_text(text, name)


def read_yaml_text(text: str, name: str, *, lines: bool = True) -> Node:
    """YAML text as nodes whose places name the source `name`, with line numbers unless `lines` is false.

    Raises:
        SpecProblems: the text is not YAML or holds something refused.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Position(name, mark.line + 1 if mark is not None and lines else None)
        words = ", ".join(filter(None, [error.context, error.problem]))
        fix = "; indent with spaces" if "'\\t'" in words else ""
        raise _problem(where, f"not valid YAML: {words}{fix}") from error
    except yaml.YAMLError as error:
        raise _problem(Position(name), f"not valid YAML: {str(error).splitlines()[0]}") from error
    if root is None:
        return Node({}, Position(name, 1)) if lines else Node(None, Position(name))
    return _Converter(name, lines).convert(root)


class _Converter:
    """PyYAML nodes -> our nodes, with the checks that need the whole."""

    def __init__(self, name: str, lines: bool) -> None:
        self.name = name
        self.lines = lines
        self.count = 0
        self.open: set[int] = set()
        self.key_at: Position | None = None

    def convert(self, node: yaml.Node, where: Position | None = None) -> Node:
        """Convert one node; `where` is the place of its key."""
        where = where or self.place(node)
        self.count += 1
        if self.count > MAX_NODES:
            raise _problem(
                self.key_at or where,
                f"aliases expand to more than {MAX_NODES} values; write them out or shorten the file",
            )
        if id(node) in self.open:
            raise _problem(where, "an alias contains itself")
        self.open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return Node(self.mapping(node), where)
            if isinstance(node, SequenceNode):
                return Node([self.convert(item) for item in node.value], where)
            self.check_text(node, where)
            return Node(scalar(node), where)
        finally:
            self.open.discard(id(node))

    def check_text(self, node: yaml.Node, where: Position) -> None:
        """Refuse what no file could hold again."""
        if any("\ud800" <= letter <= "\udfff" for letter in str(node.value)):
            raise _problem(where, "holds half of a surrogate pair, which is no character; write the character itself")

    def mapping(self, node: MappingNode) -> dict[str, Node]:
        """The entries of a mapping; each value's place is its key's line."""
        entries: dict[str, Node] = {}
        seen: dict[str, Position] = {}
        for key_node, value_node in node.value:
            where = self.place(key_node)
            if key_node.tag == _MERGE:
                raise _problem(
                    where, "merge keys (`<<`) are not allowed; put the shared part in a file and use `extends`"
                )
            if not isinstance(key_node, ScalarNode) or key_node.tag != _STR:
                raise _problem(where, "a key must be text; put it in quotes")
            self.check_text(key_node, where)
            if key_node.value in seen:
                raise _problem(
                    where, f"key `{key_node.value}` is given twice, first at {seen[key_node.value]}; keep one"
                )
            seen[key_node.value] = self.key_at = where
            entries[key_node.value] = self.convert(value_node, where)
        return entries

    def place(self, node: yaml.Node) -> Position:
        """Place of a PyYAML node."""
        return Position(self.name, node.start_mark.line + 1 if self.lines else None)


def scalar(node: yaml.Node) -> Scalar:
    """The value of a scalar node under YAML 1.2's core schema."""
    text = str(node.value)
    match node.tag.rsplit(":", 1)[-1]:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
        case "float":
            return float(text) if math.isfinite(float(text)) else text
        case _:
            return text


def _problem(where: Position, message: str) -> SpecProblems:
    return SpecProblems([SpecProblem(where, "", message)])
