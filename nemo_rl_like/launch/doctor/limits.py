"""Limits of this process, and whether the host's clock is kept."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping

from nemo_rl_like.artifacts import control_group
from nemo_rl_like.launch.doctor.finding import Finding, Level, ok

_FILES, _FEWEST_FILES = 65_536, 4_096
_FEWEST_PIDS = 4_096
_DEADLINE_S = 10.0
STRAY = ("RAY_ADDRESS", "CUDA_LAUNCH_BLOCKING", "PYTHONHASHSEED", "TORCH_DISTRIBUTED_DEBUG")
"""Variables that change a run, or slow it, and are often left over."""

Limit = Callable[[int], tuple[int, int]]


def check_limits(
    *, rdma: bool, limit: Limit = resource.getrlimit, environ: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Open files, locked memory (RDMA registers it), processes, and stray variables."""
    soft, hard = limit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        grave: Level = "fail" if hard != resource.RLIM_INFINITY and hard < _FEWEST_FILES else "warn"
        yield Finding(
            "open files",
            grave,
            f"limit {soft} (hard {hard}), Ray asks for {_FILES} on large hosts",
            f"ulimit -n {_FILES}, or LimitNOFILE= of the scheduler's daemon",
        )
    else:
        yield ok("open files", f"limit {soft}")
    locked = limit(resource.RLIMIT_MEMLOCK)[0]
    if rdma and locked != resource.RLIM_INFINITY:
        yield Finding(
            "locked memory",
            "fail",
            f"limit {locked} bytes, and RDMA registers memory without one",
            "ulimit -l unlimited (LimitMEMLOCK=infinity of the scheduler's daemon; IPC_LOCK in a container)",
        )
    processes = control_group.process_limit()
    if processes is not None and processes < _FEWEST_PIDS:
        yield Finding(
            "processes",
            "warn",
            f"the control group allows {processes} (limit {_FEWEST_PIDS})",
            "raise pids.max (docker --pids-limit, kubelet podPidsLimit)",
        )
    variables = os.environ if environ is None else environ
    stray = [name for name in STRAY if variables.get(name)]
    if stray:
        yield Finding("environment", "note", f"{', '.join(stray)} is set", "unset it if it is left over")


def check_clock(tell: Callable[[], str | None] | None = None) -> Iterator[Finding]:
    """A time service keeps the clock; hosts that disagree make logs and deadlines lie."""
    told = (tell or _synchronised)()
    if told is None:
        yield Finding("clock", "note", "no service here tells whether the clock is kept", "")
    elif told == "no":
        yield Finding("clock", "warn", "not synchronised", "start chronyd or systemd-timesyncd")
    else:
        yield ok("clock", "synchronised")


def _synchronised() -> str | None:
    if shutil.which("timedatectl") is None:
        return None
    command = ("timedatectl", "show", "--property=NTPSynchronized", "--value")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
