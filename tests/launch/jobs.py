"""Jobs for the tests: the tiny GRPO of `tests.stages.killing` on hosts of one CPU device each, and what they are compared with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.stages.killing import KILLED, TINY, write_sums, write_tiny

LAUNCH = """
launch:
  nodes: NODES
  accelerator: cpu
  devices_per_node: DEVICES
  start_timeout_s: 120
  lost_after_s: 20
  addresses: {ADDRESSES}
"""


def write_job(
    folder: Path,
    output: Path,
    *,
    nodes: int = 2,
    ranks: int = 2,
    steps: int = 4,
    addresses: Mapping[str, str],
    extra: str = "",
    engine: str = "embedded",
) -> Path:
    """A spec whose `ranks` data-parallel ranks stand on `nodes` hosts; `extra` lines are added to the launch block, and `engine` says its kind
    and further fields.
    """
    write_sums(folder)
    head = TINY.replace("{threads_per_rank: 1}", f"{{threads_per_rank: 1, layout: {{dp: {ranks}}}}}")
    names = ", ".join(f"{name}: {address}" for name, address in addresses.items())
    launch = LAUNCH.replace("NODES", str(nodes)).replace("DEVICES", str(ranks // nodes)).replace("ADDRESSES", names)
    cluster = "cluster: {object_store_gib: 0.1}\n"
    text = KILLED.replace("ENGINE", engine).replace("STEPS", str(steps))
    return write_tiny(output, launch + extra + cluster + text, head=head, folder=folder)


def nrl(
    *arguments: str, environ: Mapping[str, str] | None = None, timeout_s: float = 400.0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The finished command."""
    command = [sys.executable, "-m", "nemo_rl_like", *arguments]
    env = dict(os.environ if environ is None else environ)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd)


def wait_until(true: Callable[[], bool], what: Callable[[], str], seconds: float = 180.0) -> None:
    """Wait until something is so; `what` describes the state of things when it never is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what()
        time.sleep(0.2)


def steps_done(output: Path) -> int:
    """Metric lines of the run's `rl` stage."""
    path = output / "rl" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0
