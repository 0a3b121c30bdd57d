"""The devices that a job has on this host, counted where the scheduler has put us: inside its step, pod or container."""

from __future__ import annotations

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster.devices import visible_gpus
from nemo_rl_like.spec.hosts import HostGroup
from nemo_rl_like.spec.launch import LaunchSpec


class DevicesMissing(NrlError):
    """The scheduler gave fewer devices than the spec promises."""


def count_devices(spec: LaunchSpec, group: HostGroup, name: str) -> int:
    """GPUs that this process sees, or `devices_per_node` ranks with `accelerator: cpu`. Raises DevicesMissing."""
    seen = visible_gpus()
    if spec.accelerator == "gpu" and seen < group.devices_per_node:
        raise DevicesMissing(
            f"`{group.field}.devices_per_node` is {group.devices_per_node}, but {name} shows {seen} GPUs (CUDA_VISIBLE_DEVICES and the driver's "
            "list); ask the scheduler for as many, or lower the field (`launch.accelerator: cpu` for none)"
        )
    return group.devices_per_node
