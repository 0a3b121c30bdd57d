"""What a check of a host found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a host."""

    check: str
    """What was looked at."""
    level: Level
    """`fail`: a job would stop or go wrong; `warn`: it may be slow or unsafe; `note`: for reading; `ok`."""
    what: str
    """What was found, with the limit."""
    fix: str = ""
    """What to do; empty where nothing need be done."""


def ok(check: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(check, "ok", what)


def worst(findings: list[Finding]) -> Level:
    """The gravest level among them."""
    order: tuple[Level, ...] = ("fail", "warn", "note")
    return next((level for level in order if any(f.level == level for f in findings)), "ok")
