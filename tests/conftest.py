"""One thread a process: two-thread OpenMP stalls on a loaded machine. Ctrl-C is heard even where the tests run in the background."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has its children ignore it, and theirs


class ByFile(LoadScopeScheduling):
    """Gives a file to one worker, for the sake of its fixtures, and all services to the same one: they count processes and files."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.split("::")[0])


@cache
def scope_of(file: str) -> str:
    """What a worker gets whole."""
    path = Path(__file__).parents[1] / file
    services = path.parent.name in ("cluster", "weights") or "pytest.mark.service" in path.read_text(encoding="utf-8")
    return "services" if services else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """How several workers share the tests."""
    return ByFile(config, log)
