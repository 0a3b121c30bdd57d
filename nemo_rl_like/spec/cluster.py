"""The cluster block: where workers run and how long they may take."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec


class ClusterSpec(Spec):
    """Where workers run."""

    address: str | None = None
    """Ray address to join; default: start a local Ray."""
    devices: PositiveInt | None = None
    """Devices that ranks may use; default: visible GPUs, or CPU cores on a machine without one."""
    auth: Literal["disabled", "token"] | None = None
    """Ray's authentication: a secret of the run's own, or none; default: as RAY_AUTH_MODE says, else `token`."""
    object_store_gib: PositiveFloat = 1.0
    """Size of the local Ray object store, in GiB."""
    start_timeout_s: PositiveFloat = 180.0
    """Longest wait for Ray and for workers to start, in seconds."""
    step_timeout_s: PositiveFloat = 3600.0
    """Longest wait for one part of a step, in seconds."""
