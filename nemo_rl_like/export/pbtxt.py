"""Triton's `config.pbtxt`: protobuf's text format, read and written for the fields that generating models use.

Source: `ModelConfig` of Triton 2.51, https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

Value: TypeAlias = "str | int | float | bool | Enum | dict[str, Value] | list[Value]"
"""A field's value to write."""
Parsed: TypeAlias = "str | int | float | bool | Enum | dict[str, list[Parsed]]"
"""One value of a field that was read."""
Fields: TypeAlias = dict[str, list[Parsed]]

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<number>[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"""
    r"""|(?P<word>[A-Za-z_]\w*)|(?P<sign>[{}\[\]<>:,;])"""
)
_CLOSING = {"{": "}", "<": ">"}


class Enum(str):
    """A bare word: the name of an enumeration's value."""

    __slots__ = ()


class PbtxtError(ValueError):
    """The text is not in protobuf's text format."""


def dump(message: Mapping[str, Value], indent: str = "") -> str:
    """The message as text; a list is written as one field an item, a dict as a block."""
    lines = []
    for name, value in message.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                lines.append(f"{indent}{name} {{\n{dump(item, indent + '  ')}{indent}}}\n")
            else:
                lines.append(f"{indent}{name}: {_scalar(item)}\n")
    return "".join(lines)


def parse(text: str) -> Fields:
    """Every field with the values it was given, in order (a field given once has one).

    Raises PbtxtError naming the line.
    """
    tokens = _Tokens(text)
    found = _message(tokens, None)
    tokens.end()
    return found


def _scalar(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, Enum | int | float) else json.dumps(value)


class _Tokens:
    """The text's tokens, one ahead."""

    def __init__(self, text: str) -> None:
        self._left = self._scan(text)
        self.line = 1
        self.kind, self.text = next(self._left)

    def _scan(self, text: str) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise PbtxtError(f"line {text.count(chr(10), 0, at) + 1}: {text[at]!r} is not expected")
            if match.lastgroup is not None:
                self.line = text.count("\n", 0, at) + 1
                yield match.lastgroup, match.group()
            at = match.end()
        while True:
            yield "end", ""

    def take(self) -> tuple[str, str]:
        """This token; the next becomes current."""
        taken = self.kind, self.text
        self.kind, self.text = next(self._left)
        return taken

    def skip(self, *signs: str) -> bool:
        """Take the token if it is one of the signs."""
        found = self.kind == "sign" and self.text in signs
        if found:
            self.take()
        return found

    def end(self) -> None:
        """Raise PbtxtError unless everything was read."""
        if self.kind != "end":
            raise PbtxtError(f"line {self.line}: {self.text!r} is not expected")


def _message(tokens: _Tokens, closing: str | None) -> Fields:
    """Every field with a list of the values it was given."""
    fields: Fields = {}
    while not (tokens.skip(closing) if closing else tokens.kind == "end"):
        kind, name = tokens.take()
        if kind != "word":
            raise PbtxtError(f"line {tokens.line}: {name or 'the end'!r} where a field's name belongs")
        colon = tokens.skip(":")
        fields.setdefault(name, []).extend(_values(tokens, name, colon))
        tokens.skip(",", ";")
    return fields


def _values(tokens: _Tokens, name: str, colon: bool) -> list[Parsed]:
    if tokens.skip("["):
        found: list[Parsed] = []
        while not tokens.skip("]"):
            found.append(_value(tokens, name, True))
            if not tokens.skip(",") and tokens.text != "]":
                raise PbtxtError(f"line {tokens.line}: a comma or ] belongs after a value of `{name}`")
        return found
    return [_value(tokens, name, colon)]


def _value(tokens: _Tokens, name: str, colon: bool) -> Parsed:
    kind, text = tokens.take()
    if kind == "sign" and text in _CLOSING:
        return _message(tokens, _CLOSING[text])
    if not colon:
        raise PbtxtError(f"line {tokens.line}: a colon belongs after `{name}`")
    if kind == "string":
        while tokens.kind == "string":
            text = text[:-1] + tokens.take()[1][1:]
        return _unquoted(text)
    if kind == "number":
        return float(text) if any(c in text for c in ".eE") else int(text)
    if kind == "word":
        return text == "true" if text in ("true", "false") else Enum(text)
    raise PbtxtError(f"line {tokens.line}: {text or 'the end'!r} where the value of `{name}` belongs")


def _unquoted(text: str) -> str:
    body = text[1:-1].replace("\\'", "'")
    try:
        found: str = json.loads(f'"{body}"' if text[0] == '"' else json.dumps(body))
    except ValueError as error:
        raise PbtxtError(f"{text}: an escape that is not known") from error
    return found
