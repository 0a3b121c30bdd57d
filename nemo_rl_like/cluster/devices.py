"""How many devices the ranks of a run may use, on this host or in a job of several, found without torch and without starting anything."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.cluster import joined
from nemo_rl_like.spec.cluster import ClusterSpec

_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
_DEVICE_FOLDER = Path("/dev")
_GPU_NODE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class Devices:
    """What ranks run on."""

    kind: Literal["gpu", "cpu"]
    """`gpu` when the host shows an NVIDIA GPU, else `cpu` (one device a core); in a job, what the job was made for."""
    count: int
    """Devices that ranks may use."""


def visible_devices(spec: ClusterSpec) -> Devices:
    """The job's devices; else the GPUs, or the CPU cores of a host without one. `spec.devices` overrides the number, not the kind."""
    job = joined.of_environment(os.environ)
    if job is not None:
        return Devices(job.kind, spec.devices or job.devices)
    gpus = visible_gpus()
    kind: Literal["gpu", "cpu"] = "gpu" if gpus else "cpu"
    return Devices(kind, spec.devices or gpus or len(os.sched_getaffinity(0)))


def require_devices(ranks: int, spec: ClusterSpec, *, what: str = "policy.layout") -> Devices:
    """The devices, if there is one for every rank. Raises SpecError naming the field, both numbers and the fix."""
    devices = visible_devices(spec)
    if spec.address is None and ranks > devices.count:
        raise SpecError(
            f"`{what}` asks for {ranks} ranks, but there are {devices.count} {devices.kind} devices; "
            f"make dp * pp * cp * tp at most {devices.count}, or set `cluster.devices` if ranks may share a device"
        )
    return devices


def threads_of_rank(asked: int, ranks: int) -> int:
    """CPU threads of one rank: `asked`, or for 0 this host's cores divided by the ranks on it, at least 1."""
    return asked or max(1, len(os.sched_getaffinity(0)) // max(1, ranks))


def visible_gpus() -> int:
    """GPUs of this host that `CUDA_VISIBLE_DEVICES` shows; all of them where it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = _present_gpus()
    if named is None or present == 0:
        return present
    shown = [name for name in named.split(",") if name.strip() and not name.strip().startswith("-")]
    return min(len(shown), present)


def _present_gpus() -> int:
    """GPUs that the driver lists; sandboxes that hide its list still have a device node for each."""
    listed = len(list(_GPU_FOLDER.iterdir())) if _GPU_FOLDER.is_dir() else 0
    return listed or sum(_GPU_NODE.fullmatch(node.name) is not None for node in _DEVICE_FOLDER.iterdir())
