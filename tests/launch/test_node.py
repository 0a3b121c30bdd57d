"""Laws of one host's part: what its processes are told, its token, its devices, its address."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.cluster.devices import Devices, visible_devices
from nemo_rl_like.cluster.joined import ENV, JobCluster, of_environment
from nemo_rl_like.launch.node import devices as devices_module
from nemo_rl_like.launch.node import held, token
from nemo_rl_like.launch.node.address import NoAddress, interface_of, own_address, resolve
from nemo_rl_like.launch.node.devices import DevicesMissing, count_devices
from nemo_rl_like.launch.node.node import _Host, _Signals, run_node
from nemo_rl_like.launch.node.place import Place, PlaceError
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.hosts import GenerationSpec
from nemo_rl_like.spec.launch import LaunchSpec
from nemo_rl_like.spec.loader import resolved_yaml
from tests.launch.jobs import wait_until, write_job


def spec_of(**launch: Any) -> ExperimentSpec:
    values = {
        "output": "run",
        "model": {"init": {}, "tokenizer": {"characters": "0123456789+="}},
        "environment": {"name": "arithmetic"},
        "stages": [{"kind": "evaluate"}],
        "secrets": {"HUB": {"env": "MY_HUB_TOKEN"}},
        "launch": {"accelerator": "cpu", "devices_per_node": 2, **launch},
    }
    return ExperimentSpec.model_validate(values)


def host_of(tmp_path: Path, place: Place, **launch: Any) -> _Host:
    return _Host(spec_of(**{"nodes": place.nodes, **launch}), place, tmp_path, [], _Signals())


def test_secrets_reach_the_driver_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(token.PATH_ENV, raising=False)
    for name in ("MY_HUB_TOKEN", "OTHER_API_KEY", "SLURM_JOB_ID", "PMI_RANK"):
        monkeypatch.setenv(name, "hidden")
    path = token.make(tmp_path)
    host = host_of(tmp_path, Place("alone", 2, 0), environment={"MINE": "1"})
    ray, driver = host._daemon_environ("127.0.0.1"), host._driver_environ(host._cluster("10.0.0.1:12001", 4))
    assert "hidden" not in ray.values() and [name for name, value in driver.items() if value == "hidden"] == [
        "MY_HUB_TOKEN"
    ]
    for environ in (ray, driver):
        assert environ["MINE"] == "1" and environ["RAY_AUTH_MODE"] == "token"
        assert environ["RAY_AUTH_TOKEN_PATH"] == str(path) and path.read_text() not in environ.values()
    assert ray["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_driver_learns_of_the_jobs_cluster_from_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(tmp_path, Place("alone", 2, 0), auth="disabled", environment={"MINE": "1"})
    cluster = host._cluster("10.0.0.1:12001", 4)
    assert (
        of_environment(cluster.variable())
        == cluster
        == JobCluster("10.0.0.1:12001", "disabled", "cpu", 4, 2, ("MINE",))
    )
    monkeypatch.setenv(ENV, cluster.variable()[ENV])
    assert visible_devices(ClusterSpec()) == Devices("cpu", 4)
    assert visible_devices(ClusterSpec(devices=3)) == Devices("cpu", 3)


@pytest.mark.parametrize("text", ["{}", "[1]", "x", json.dumps({"address": "a", "other": 1})])
def test_a_cluster_that_nobody_wrote_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="NRL_CLUSTER is"):
        of_environment({ENV: text})


def test_one_host_needs_no_token_and_several_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(token.PATH_ENV, raising=False)
    for asked, mode in (("token", "token"), ("token", "disabled"), ("disabled", "token")):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        alone = host_of(tmp_path, Place("alone", 1, 0), auth=asked)
        expected = "token" if asked == mode == "token" else "disabled"
        assert alone._environ()["RAY_AUTH_MODE"] == expected and alone.token is None
    with pytest.raises(SpecError, match=r"`launch\.auth` is token, and there is no .*RAY_AUTH_TOKEN_PATH"):
        host_of(tmp_path, Place("alone", 2, 0))
    made = token.make(tmp_path)
    assert made.stat().st_mode & 0o777 == 0o600 and len(made.read_text()) == 64
    first = made.read_text()
    assert token.make(tmp_path).read_text() != first
    made.chmod(0o640)
    with pytest.raises(SpecError, match=r"may be read by others \(mode 0640\).*chmod 600"):
        host_of(tmp_path, Place("alone", 2, 0))


def counted(spec: LaunchSpec, rank: int = 0) -> int:
    return count_devices(spec, spec.group_of(rank), "node1")


def test_a_host_that_generates_tells_ray_so_and_the_driver_counts_its_devices_apart(tmp_path: Path) -> None:
    launch = {"nodes": 2, "devices_per_node": 2, "generation": {"nodes": 1, "devices_per_node": 3}}
    hosts = [host_of(tmp_path, Place("slurm", 3, rank, groups=(2, 1)), auth="disabled", **launch) for rank in range(3)]
    assert [host._resources().role for host in hosts] == ["train", "train", "generate"]
    assert [host._resources().cpus for host in hosts] == [2, 2, 3]
    cluster = hosts[0]._cluster("10.0.0.1:12001", 7)
    assert (cluster.nodes, cluster.devices, cluster.generation_devices) == (3, 4, 3)
    alike = host_of(tmp_path, Place("slurm", 2, 0), auth="disabled", nodes=2)
    assert alike._resources().role is None


def test_gpus_are_counted_inside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "visible_gpus", lambda: 4)
    assert counted(LaunchSpec(devices_per_node=4)) == 4
    assert counted(LaunchSpec(devices_per_node=2)) == 2, "the rest of the host is not the job's"
    with pytest.raises(DevicesMissing, match=r"`launch\.devices_per_node` is 8, but node1 shows 4 GPUs"):
        counted(LaunchSpec(devices_per_node=8))
    generation = GenerationSpec(devices_per_node=6)
    with pytest.raises(DevicesMissing, match=r"`launch\.generation\.devices_per_node` is 6, but node1 shows 4 GPUs"):
        counted(LaunchSpec(devices_per_node=4, generation=generation), rank=1)


def test_an_address_is_named_or_resolved_or_refused_with_the_fix() -> None:
    known = {"node7": "10.0.0.7"}
    assert resolve("node7", known) == own_address("node7", known) == "10.0.0.7"
    assert resolve("localhost", {}) == "127.0.0.1"
    with pytest.raises(NoAddress, match=r"host 'no-such-host\.invalid'.*`launch\.addresses`"):
        resolve("no-such-host.invalid", {})
    assert interface_of("127.0.0.5") == "lo" and interface_of("203.0.113.9") is None


def test_a_name_for_loopback_is_of_no_use_to_others() -> None:
    try:
        assert not own_address("localhost", {}).startswith("127.")
    except NoAddress as error:
        assert "no default route" in str(error)


def test_a_contradicting_place_ends_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(resolved_yaml(spec_of(nodes=2).model_copy(update={"output": str(tmp_path / "run")})))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(PlaceError, match="by kubernetes and by ray"):
        run_node(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_host_that_waits_for_a_head_that_was_stopped_before_it_listened_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's file reaches all; a head that had read it already is gone, and nobody would tell this host until its deadline."""
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    path, stop = tmp_path / "spec.yaml", tmp_path / "stop"
    spec = spec_of(nodes=2, doctor=False, start_timeout_s=30.0, auth="disabled")
    path.write_text(resolved_yaml(spec.model_copy(update={"output": str(tmp_path / "run")})))
    stop.touch()
    assert run_node(path, stop_file=stop) == 75


def test_a_signal_that_was_held_is_heard_once_it_is_answered() -> None:
    early: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: early.append(number))
    try:
        held.hold()
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        with _Signals.heard(None) as signals:
            assert (signals.take(), early) == ([signal.SIGUSR1], [])
    finally:
        held.release()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_a_signal_that_comes_while_it_is_imported_is_a_stop(tmp_path: Path) -> None:
    """The real command, told as soon as it lets signals wait; without that SIGTERM ends it, which its job would count as a failure."""
    spec = write_job(tmp_path, tmp_path / "run", nodes=1, ranks=1, addresses={}, extra="  doctor: false\n")
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "nemo_rl_like", "node", str(spec)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: blocks(process.pid, signal.SIGTERM), lambda: (tmp_path / "log").read_text(), seconds=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    finally:
        process.kill()
    assert "stopped by SIGTERM before the driver had started" in (tmp_path / "log").read_text()


def blocks(pid: int, number: int) -> bool:
    """Whether a process lets a signal wait (proc_pid_status(5))."""
    mask = re.search(r"^SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return mask is not None and bool(int(mask.group(1), 16) >> (number - 1) & 1)
