"""A bounded evaluator of whole-number expressions: its own parser, no `eval`, and limits on length, depth and size."""

from __future__ import annotations

import re

MAX_LENGTH = 64
"""Longest expression, in characters."""
MAX_DEPTH = 8
"""Deepest nesting of brackets and signs."""
MAX_VALUE = 10**12
"""Largest magnitude of any value on the way."""
_TOKEN = re.compile(r"\s*(?:(\d+)|(//|[-+*/()]))")


class CalculationError(ValueError):
    """The expression cannot be evaluated; the text is what the model is told."""


def evaluate(expression: str) -> int:
    """Value of an expression of whole numbers, `+ - * / //` and brackets; `/` must come out even.

    Raises CalculationError.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"expression is longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    parser.expect_end()
    return value


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    text = expression.rstrip()
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalculationError(f"unexpected {text[position:].lstrip()[:1]!r}")
        tokens.append(match.group(1) or match.group(2))
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent: sum = product (+|- product)*; product = signed (*|/|// signed)*; signed = -signed | number | (sum)."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def sum(self, depth: int) -> int:
        value = self._product(depth)
        while (sign := self._take("+", "-")) is not None:
            other = self._product(depth)
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def expect_end(self) -> None:
        if self._next < len(self._tokens):
            raise CalculationError(f"unexpected {self._tokens[self._next]!r}")

    def _product(self, depth: int) -> int:
        value = self._signed(depth)
        while (sign := self._take("*", "//", "/")) is not None:
            value = _bounded(_multiplied(value, sign, self._signed(depth)))
        return value

    def _signed(self, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise CalculationError(f"nested deeper than {MAX_DEPTH}")
        if self._take("-") is not None:
            return -self._signed(depth + 1)
        if self._take("(") is not None:
            value = self.sum(depth + 1)
            if self._take(")") is None:
                raise CalculationError("missing ')'")
            return value
        return self._number()

    def _number(self) -> int:
        if self._next == len(self._tokens):
            raise CalculationError("expression ends too early")
        token = self._tokens[self._next]
        if not token.isdigit():
            raise CalculationError(f"unexpected {token!r}")
        self._next += 1
        return _bounded(int(token))

    def _take(self, *wanted: str) -> str | None:
        if self._next < len(self._tokens) and self._tokens[self._next] in wanted:
            self._next += 1
            return self._tokens[self._next - 1]
        return None


def _multiplied(left: int, sign: str, right: int) -> int:
    if sign == "*":
        return left * right
    if right == 0:
        raise CalculationError("division by zero")
    if sign == "/" and left % right:
        raise CalculationError("division with a remainder; use // for whole division")
    return left // right


def _bounded(value: int) -> int:
    if abs(value) > MAX_VALUE:
        raise CalculationError(f"value is larger than {MAX_VALUE}")
    return value
