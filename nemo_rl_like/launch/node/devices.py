"""The devices that a job has on this host, counted where the scheduler has put us: inside its step, pod or container."""

from __future__ import annotations

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster.devices import visible_gpus
from nemo_rl_like.spec.launch import LaunchSpec


class DevicesMissing(NrlError):
    """The scheduler gave fewer devices than the spec promises."""


def count_devices(spec: LaunchSpec, name: str) -> int:
    """GPUs that this process sees, or `devices_per_node` ranks with `accelerator: cpu`. Raises DevicesMissing."""
    if spec.accelerator == "cpu":
        return spec.devices_per_node
    seen = visible_gpus()
    if seen < spec.devices_per_node:
        raise DevicesMissing(
            f"`launch.devices_per_node` is {spec.devices_per_node}, but {name} shows {seen} GPUs (CUDA_VISIBLE_DEVICES and the driver's "
            "list); ask the scheduler for as many, or lower the field (`launch.accelerator: cpu` for none)"
        )
    return spec.devices_per_node
