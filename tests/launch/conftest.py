"""A real Slurm, and submissions to it whose `nrl node` is a stub; `test_slurm.py` has a Slurm of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm_cluster import Cluster, running
from tests.launch.slurm_stub import Stub


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One whose SIGTERM reaches `nrl node` alone, as with `proctrack/cgroup`."""
    with running(tmp_path_factory.mktemp("slurm"), tracking="pgid") as cluster:
        yield cluster


@pytest.fixture
def stub(slurm: Cluster, tmp_path: Path) -> Stub:
    """What a module's `slurm` is asked to do."""
    return Stub(slurm, tmp_path)
