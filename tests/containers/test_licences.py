"""The committed list of licences is that of the locks, as packages declare them; what runs beside the product is not under the GPL."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = ROOT / "requirements/licences.tsv"
FORBIDDEN = re.compile(
    r"(?<![L])GPL|(?<!Lesser )General Public License|AGPL|AFFERO|SSPL|non-?commercial|not declared", re.IGNORECASE
)
PROPRIETARY = {"intel-openmp", "intel-cmplr-lib-ur"}
"""Intel's run-time libraries, which its licence lets everybody pass on; the CPU build of vLLM links against them."""


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines(), delimiter="\t"))


def refused(listed: list[dict[str, str]]) -> list[str]:
    """Packages needed at run time whose licence the product cannot have."""
    return [r["name"] for r in listed if r["needed by"] != "test" and FORBIDDEN.search(r["licence"])]


def test_the_list_is_that_of_the_locks_and_of_what_packages_declare(tmp_path: Path) -> None:
    """`make licences` writes it anew after `make lock`; read the difference."""
    script = str(ROOT / "containers/licences.py")
    subprocess.run([sys.executable, script, str(tmp_path / "list")], check=True, timeout=120)
    assert (tmp_path / "list").read_text() == LIST.read_text()
    locked = set(re.findall(r"^([\w.-]+)(?:\[[^]]*])?==", (ROOT / "requirements/test.txt").read_text(), re.MULTILINE))
    assert len(locked) == len(rows(LIST.read_text())) > 200


def test_nothing_that_runs_beside_the_product_is_under_the_gpl_or_under_nothing() -> None:
    listed = rows(LIST.read_text())
    assert refused(listed) == []
    closed = {r["name"] for r in listed if "roprietary" in r["licence"]}
    assert closed == PROPRIETARY and {r["needed by"] for r in listed if r["name"] in closed} == {"vllm"}


@pytest.mark.parametrize(
    "licence", ["GPL-3.0", "AGPL-3.0-only", "GNU General Public License v3 (GPLv3)", "not declared"]
)
def test_a_licence_that_cannot_be_had_is_seen(licence: str) -> None:
    found = {"name": "x", "version": "1", "needed by": "run", "licence": licence}
    assert refused([found]) == ["x"] and refused([{**found, "needed by": "test"}]) == []


def test_a_lesser_licence_is_let_in() -> None:
    row = {"name": "x", "version": "1", "needed by": "run"}
    assert (
        refused(
            [{**row, "licence": name} for name in ("LGPL-2.1-only", "GNU Lesser General Public License v3 (LGPLv3)")]
        )
        == []
    )
