"""One Ray for each test module: its start is the cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.spec.cluster import ClusterSpec


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaySession]:
    patch = pytest.MonkeyPatch()
    patch.setenv("NRL_TEST_TOKEN", "must not reach a worker")
    spec = ClusterSpec(object_store_gib=0.1, start_timeout_s=120, devices=4)
    with RaySession.start(spec, tmp_path_factory.mktemp("run")) as started:
        yield started
    patch.undo()
