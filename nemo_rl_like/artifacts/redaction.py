"""Keeps secrets out of what is written: their values, once watched, are replaced in logs, errors and records.

What a secret's owner does with it is its own: messages that an environment sends to the model are not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

SHORTEST = 4
"""Characters of the shortest value that is looked for: a shorter one would take ordinary text with it."""

_watched: dict[str, str] = {}


def watch(secrets: Mapping[str, str]) -> None:
    """Look for these values, by the name that stands in their place, from now on in this process."""
    _watched.update({value: name for name, value in secrets.items() if len(value) >= SHORTEST})


def redacted(text: str) -> str:
    """`text` with every watched value as `<secret NAME>`; of values that contain one another the longest first."""
    for value in sorted(_watched, key=len, reverse=True):
        text = text.replace(value, f"<secret {_watched[value]}>")
    return text


class RedactingFormatter(logging.Formatter):
    """A log formatter whose lines, tracebacks too, hold no watched value."""

    def format(self, record: logging.LogRecord) -> str:
        """The redacted line."""
        return redacted(super().format(record))


def redacting_handlers(format_: str) -> None:
    """Give every handler of the root logger lines of `format_` without watched values."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(RedactingFormatter(format_))
