"""One thread a process: two-thread OpenMP stalls on a loaded machine. Ctrl-C is heard even where the tests run in the background."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has its children ignore it, and theirs


@pytest.hookimpl(tryfirst=True)  # the marks must be there when xdist reads them
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """With several workers a file is one worker's, for the sake of its fixtures, and all services are: they count processes and files."""
    for item in items:
        services = item.get_closest_marker("service") is not None or item.path.parent.name in ("cluster", "weights")
        item.add_marker(pytest.mark.xdist_group("services" if services else item.location[0]))
