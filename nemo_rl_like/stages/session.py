"""One Ray for all stages of a process, started at the first need and ended at exit."""

from __future__ import annotations

import atexit
from pathlib import Path

from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.spec.cluster import ClusterSpec

_current: tuple[ClusterSpec, Path, RaySession] | None = None


def shared_session(spec: ClusterSpec, run_folder: Path) -> RaySession:
    """The Ray of this run; another run's is ended first. Raises SpecError, ClusterStartError."""
    global _current
    if _current is not None and _current[:2] == (spec, run_folder):
        return _current[2]
    close_session()
    _current = (spec, run_folder, RaySession.start(spec, run_folder))
    return _current[2]


def close_session() -> None:
    """End the Ray that `shared_session` started, if there is one."""
    global _current
    if _current is not None:
        _current[2].shutdown()
        _current = None


atexit.register(close_session)
