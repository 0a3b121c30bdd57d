"""Writes what an environment is made of: `sbom.cdx.json` (CycloneDX 1.6) and `licences.txt`. Run it with the environment's own Python.

python containers/sbom.py FOLDER
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

OURS = "nemo-rl-like"
UNKNOWN = "not declared"
TEXTS = {
    "Apache License": "Apache-2.0",
    "Permission is hereby granted, free of charge": "MIT",
    "Redistribution and use in source and binary forms": "BSD",
}
"""Licences by words that stand in their text alone."""


def main() -> int:
    """Write both files; returns the exit code."""
    if len(sys.argv) != 2:
        sys.stderr.write(__doc__ or "")
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    packages = found()
    (folder / "sbom.cdx.json").write_text(json.dumps(bill(packages), indent=1) + "\n", encoding="utf-8")
    (folder / "licences.txt").write_text("".join(f"{line}\n" for line in licence_lines(packages)), encoding="utf-8")
    return 0


def found() -> list[Distribution]:
    """Every installed package once, as Python would import it, by name."""
    first: dict[str, Distribution] = {}
    for package in distributions():
        first.setdefault(normal(package.name), package)
    return [first[name] for name in sorted(first)]


def bill(packages: list[Distribution]) -> dict[str, Any]:
    """The bill of materials; equal environments have equal bills."""
    components = [component(p) for p in packages if normal(p.name) != OURS]
    ours = [component(p) for p in packages if normal(p.name) == OURS]
    content = json.dumps([*ours, *components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": {**ours[0], "type": "application"}} if ours else {},
        "components": components,
    }


def component(package: Distribution) -> dict[str, Any]:
    """One package."""
    url = f"pkg:pypi/{quote(normal(package.name))}@{quote(package.version, safe='')}"
    return {
        "type": "library",
        "bom-ref": url,
        "name": normal(package.name),
        "version": package.version,
        "purl": url,
        "licenses": licences(package),
    }


def licences(package: Distribution) -> list[dict[str, Any]]:
    """What a package declares, best first: an SPDX expression, its classifiers, a short text, its licence's own words; none where it says nothing."""
    about = package.metadata
    if expression := about.get("License-Expression"):
        return [{"expression": expression}]
    classified = [c.rsplit(" :: ", 1)[-1] for c in about.get_all("Classifier", []) if c.startswith("License :: ")]
    named = [c for c in classified if c != "OSI Approved"]
    if named:
        return [{"license": {"name": name}} for name in sorted(set(named))]
    text = (about.get("License") or "").strip()
    if text:
        return [{"license": {"name": text.splitlines()[0][:100]}}]
    files = [package.read_text(f"licenses/{name}") or "" for name in about.get_all("License-File", [])]
    return [{"license": {"name": name}} for words, name in TEXTS.items() if any(words in file for file in files)]


def licence_lines(packages: list[Distribution]) -> list[str]:
    """A line for each package: name, version, licence."""
    return ["\t".join([normal(p.name), p.version, licence(p)]) for p in packages]


def licence(package: Distribution) -> str:
    """What a package declares, in one line."""
    return " / ".join(c.get("expression") or c["license"]["name"] for c in licences(package)) or UNKNOWN


def normal(name: str) -> str:
    """A package's name as indexes write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
