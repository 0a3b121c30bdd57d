"""What is wrong with a bundle, found by its validators."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_like.artifacts.errors import NrlError


class BundleError(NrlError):
    """A bundle is not what its kind must be, or does not compute what the trainer's model does."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that a server would stumble on."""

    path: str
    """File or folder, relative to the bundle."""
    message: str
    """What is wrong with it, and the fix."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def require_none(problems: Iterable[Problem], folder: Path) -> None:
    """Raise BundleError that lists the problems, if there are any."""
    found = list(problems)
    if found:
        raise BundleError("\n  ".join([f"{folder} has {len(found)} problem(s)", *map(str, found)]))


def read_object(file: Path, name: str) -> tuple[dict[str, Any], list[Problem]]:
    """The JSON object in `file`, which problems call `name`; an empty one with the problem if it is missing or none."""
    if not file.is_file():
        return {}, [Problem(name, "is missing; export again, or copy it")]
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        return {}, [Problem(name, f"is not valid JSON ({error}); write it again")]
    if not isinstance(found, dict):
        return {}, [Problem(name, f"holds a {type(found).__name__}, must hold an object; write it again")]
    return found, []
