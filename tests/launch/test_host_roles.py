"""Hosts that train and hosts that generate, on a real Ray of two: a group stands on hosts of its kind alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nemo_rl_like.cluster.environment import allowed
from nemo_rl_like.cluster.errors import ClusterStartError
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.joined import JobCluster
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.launch.node.daemons import RayDaemons, Resources
from nemo_rl_like.launch.node.ports import take
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.hosts import HostRole
from nemo_rl_like.spec.launch import PortsSpec
from tests.launch.jobs import wait_until

pytestmark = [pytest.mark.service, pytest.mark.slow]


def hosts_of(session: RaySession, role: HostRole | None, devices: float, ranks: int = 2) -> set[str]:
    with WorkerGroup.start("group", session=session, axes={"rank": ranks}, devices=devices, role=role) as group:
        return set(group.addresses)


@contextmanager
def ray_of(folder: Path, *hosts: HostRole) -> Iterator[str]:
    """Ray's daemons of hosts of two cores each, as `nrl node` starts them; the head's address."""
    with ExitStack() as undo:
        head = None
        for i, role in enumerate(hosts):
            daemons, address = RayDaemons(folder / f"{role}.log"), f"127.0.0.{i + 2}"
            undo.callback(daemons.stop)
            block, holder = take(PortsSpec(), f"{folder}-{role}")
            undo.enter_context(holder)
            environ = allowed(os.environ) | {"RAY_AUTH_MODE": "disabled"}
            daemons.start(block, address, Resources(2, 0, 80 << 20, role), environ, head, seconds=120)
            if head is None:
                head = f"{address}:{block.gcs}"
                wait_for(address, block.gcs, daemons.log)
        yield str(head)


def wait_for(address: str, port: int, log: Path) -> None:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((address, port)) == 0

    wait_until(answers, log.read_text, seconds=60)


def test_a_group_stands_on_hosts_of_its_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_of(tmp_path, "train", "generate") as head:
        job = JobCluster(head, "disabled", "cpu", 2, 2, generation_devices=2)
        for name, value in job.variable().items():
            monkeypatch.setenv(name, value)
        with RaySession.start(ClusterSpec(start_timeout_s=120), tmp_path) as session:
            assert session.split and session.devices.count == 2, "ranks are for the hosts that train"
            for devices in (0.0, 1.0):
                assert hosts_of(session, "train", devices) == {"127.0.0.2"}
                assert hosts_of(session, "generate", devices) == {"127.0.0.3"}
            assert hosts_of(session, None, 1.0, ranks=4) == {"127.0.0.2", "127.0.0.3"}
            session.spec = session.spec.model_copy(update={"start_timeout_s": 3.0})
            with pytest.raises(ClusterStartError, match="nrl_train"):
                hosts_of(session, "train", 1.0, ranks=3)
