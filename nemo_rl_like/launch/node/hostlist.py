"""Slurm's short form of host names, `gpu[01-03,7],login`, written out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nemo_rl_like.artifacts.errors import InputError

_PART = re.compile(r"(?:[^,\[\]]+|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 1 << 16


def expand(text: str) -> list[str]:
    """The host names in their order, as `scontrol show hostnames` prints them. Raises InputError for a text that is no list."""
    rest = _PART.sub("", text)
    if not text or set(rest) - {","} or rest.count(",") != len(_PART.findall(text)) - 1:
        raise _unreadable(text)
    names: list[str] = []
    for part in _PART.findall(text):
        for name in _names(part, text):
            names.append(name)
            if len(names) > _MOST:
                raise _unreadable(text)
    return names


def _names(part: str, text: str) -> Iterator[str]:
    bracket = _BRACKET.search(part)
    if bracket is None:
        yield part
        return
    before, after = part[: bracket.start()], part[bracket.end() :]
    for piece in bracket.group(1).split(","):
        found = _RANGE.fullmatch(piece)
        if found is None:
            raise _unreadable(text)
        first, last = found.group(1), found.group(2) or found.group(1)
        for number in range(int(first), int(last) + 1):
            for rest in _names(after, text) if after else ("",):
                yield f"{before}{number:0{len(first)}d}{rest}"


def _unreadable(text: str) -> InputError:
    return InputError(f"{text!r} is no list of hosts as Slurm writes them, such as gpu[01-03,7],login")
