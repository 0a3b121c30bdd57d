"""GPUs and their driver, as `nvidia-smi` tells them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata

from nemo_rl_like.launch.doctor.finding import Finding, ok

FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "compute_mode",
)
_QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
_DEADLINE_S = 30.0
_BUSY_MIB = 1024
DRIVERS = {13: 580, 12: 525}
"""Oldest driver of each CUDA major version (NVIDIA's compatibility table)."""


def check_gpus(
    promised: int | None, tell: Callable[[], str | None] | None = None, cuda: str | None = None
) -> Iterator[Finding]:
    """Drivers, errors and what else runs; `promised`: GPUs that the job takes of this host, None if it takes none."""
    told = (tell or _tell)()
    if told is None:
        yield from _without_gpus(promised)
        return
    rows = [
        dict(zip(FIELDS, (cell.strip() for cell in line.split(",")), strict=False))
        for line in told.splitlines()
        if line.strip()
    ]
    yield from _count(rows, promised)
    for row in rows:
        yield from _one(row)
    yield from _driver(rows, cuda if cuda is not None else _cuda_of_torch())


def _without_gpus(promised: int | None) -> Iterator[Finding]:
    if promised:
        yield Finding(
            "gpus",
            "fail",
            f"nvidia-smi does not answer, and the job takes {promised} GPU(s) of this host",
            "install the NVIDIA driver, or set `launch.accelerator: cpu`",
        )
    else:
        yield ok("gpus", "none, and none is asked for")


def _count(rows: list[dict[str, str]], promised: int | None) -> Iterator[Finding]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(rows) if visible is None else len([name for name in visible.split(",") if name.strip()])
    if promised is not None and there < promised:
        yield Finding(
            "gpus",
            "fail",
            f"{there} visible of {len(rows)} present, the job takes {promised}",
            "lower `launch.devices_per_node`, or ask the scheduler for more",
        )
    else:
        yield ok("gpus", f"{there} visible: {', '.join(sorted({row['name'] for row in rows}))}")


def _one(row: dict[str, str]) -> Iterator[Finding]:
    where = f"gpu {row['index']}"
    used, errors = row.get("memory.used", ""), row.get("ecc.errors.uncorrected.volatile.total", "")
    if used.isdigit() and int(used) > _BUSY_MIB:
        yield Finding(
            where, "warn", f"{used} MiB are in use (limit {_BUSY_MIB})", "end the other process: `nvidia-smi` names it"
        )
    if errors.isdigit() and int(errors) > 0:
        yield Finding(
            where,
            "fail",
            f"{errors} uncorrected memory errors",
            "reset the GPU or drain the host: results on it are not to be trusted",
        )
    if row.get("compute_mode") not in (None, "", "Default", "[N/A]"):
        yield Finding(
            where, "warn", f"compute mode is {row['compute_mode']}", "`nvidia-smi -c 0`: trainer and engine share a GPU"
        )


def _driver(rows: list[dict[str, str]], cuda: str | None) -> Iterator[Finding]:
    versions = sorted({row["driver_version"] for row in rows})
    if len(versions) > 1:
        yield Finding(
            "driver", "fail", f"several versions answer: {', '.join(versions)}", "reboot the host after a driver update"
        )
        return
    major = int(cuda.split(".")[0]) if cuda else 0
    oldest = DRIVERS.get(major, 0)
    if versions and oldest and int(versions[0].split(".")[0]) < oldest:
        yield Finding(
            "driver",
            "fail",
            f"{versions[0]}, but PyTorch is built for CUDA {cuda}, which needs {oldest} or newer",
            "update the driver, or install PyTorch for an older CUDA",
        )
    elif versions:
        yield ok("driver", versions[0])


def _cuda_of_torch() -> str | None:
    """CUDA of the installed PyTorch, from its version, without importing it."""
    try:
        found = re.search(r"\+cu(\d+)(\d)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None
    return f"{found[1]}.{found[2]}" if found else None


def _tell() -> str | None:
    try:
        return subprocess.run(_QUERY, capture_output=True, text=True, timeout=_DEADLINE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
