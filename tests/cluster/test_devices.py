"""How many devices there are, on hosts that show their GPUs in different ways."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_rl_like.cluster import devices
from nemo_rl_like.cluster.devices import Devices, visible_devices
from nemo_rl_like.spec.cluster import ClusterSpec


@pytest.mark.parametrize("listed", [True, False])
def test_gpus_are_found_by_the_drivers_list_or_by_their_nodes(
    listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, nodes = tmp_path / "gpus", tmp_path / "dev"
    nodes.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (nodes / name).touch()
    if listed:
        (driver / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "_GPU_FOLDER", driver)
    monkeypatch.setattr(devices, "_DEVICE_FOLDER", nodes)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    present = 1 if listed else 2
    assert visible_devices(ClusterSpec()) == Devices("gpu", present)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_devices(ClusterSpec()) == Devices("gpu", 1)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_devices(ClusterSpec()) == Devices("cpu", len(os.sched_getaffinity(0)))
