"""Every check of a host finds what is wrong, names the fix, and is quiet once that is mended."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from nemo_rl_like.launch.doctor import storage
from nemo_rl_like.launch.doctor.examine import examine
from nemo_rl_like.launch.doctor.finding import Finding, worst
from nemo_rl_like.launch.doctor.gpus import check_gpus
from nemo_rl_like.launch.doctor.limits import check_clock, check_limits
from nemo_rl_like.launch.doctor.network import check_fabric, check_interfaces, check_ports, check_proxies
from nemo_rl_like.launch.doctor.packages import check_packages
from nemo_rl_like.launch.doctor.storage import check_shared, check_shm
from tests.cli.command import nrl

H100 = "{}, NVIDIA H100, {}, 81559, {}, {}, {}"
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def bad(findings: Iterable[Finding]) -> list[Finding]:
    return [f for f in findings if f.level in ("warn", "fail")]


def cards(*rows: str) -> Callable[[], str]:
    return lambda: "\n".join(rows) + "\n"


def card(index: int = 0, driver: str = "580.65", used: str = "4", errors: str = "0", mode: str = "Default") -> str:
    return H100.format(index, driver, used, errors, mode)


def test_good_gpus_are_quiet() -> None:
    assert bad(check_gpus(2, cards(card(0), card(1)), "13.0")) == []
    assert bad(check_gpus(None, lambda: None)) == []


@pytest.mark.parametrize(
    ("promised", "rows", "words"),
    [
        (3, (card(0), card(1)), "2 visible of 2 present, the job takes 3"),
        (1, (card(used="5000"),), "5000 MiB are in use"),
        (1, (card(errors="7"),), "7 uncorrected memory errors"),
        (1, (card(mode="Exclusive_Process"),), "compute mode is Exclusive_Process"),
        (1, (card(driver="535.1"),), "535.1, but PyTorch is built for CUDA 13.0, which needs 580"),
        (2, (card(0), card(1, driver="570.1")), "several versions answer: 570.1, 580.65"),
    ],
)
def test_what_is_wrong_with_gpus_is_found(promised: int, rows: tuple[str, ...], words: str) -> None:
    (found,) = bad(check_gpus(promised, cards(*rows), "13.0"))
    assert words in found.what and found.fix


def test_promised_gpus_without_a_driver_fail() -> None:
    (found,) = bad(check_gpus(8, lambda: None))
    assert found.level == "fail" and "launch.accelerator: cpu" in found.fix


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "1 visible of 2" in bad(check_gpus(2, cards(card(0), card(1)), "13.0"))[0].what


@pytest.mark.parametrize(
    ("value", "found"), [("eth0", 0), ("eth", 0), ("=eth", 1), ("^lo", 0), ("ib0", 1), ("eth0,ib9", 1), ("", 0)]
)
def test_interfaces_that_are_not_there_are_found(tmp_path: Path, value: str, found: int) -> None:
    for name in ("lo", "eth0"):
        (tmp_path / name).mkdir()
    assert len(bad(check_interfaces({"NCCL_SOCKET_IFNAME": value}, tmp_path))) == found


def fabric(folder: Path, **states: str) -> Path:
    for device, state in states.items():
        port = folder / device / "ports" / "1"
        port.mkdir(parents=True, exist_ok=True)
        (port / "state").write_text(state)
    return folder


def test_fabric(tmp_path: Path) -> None:
    up, down = "4: ACTIVE\n", "1: DOWN\n"
    assert bad(check_fabric(1, {}, tmp_path / "none")) == []
    assert "over TCP" in bad(check_fabric(2, {}, tmp_path / "none"))[0].what
    assert bad(check_fabric(2, {"NCCL_IB_HCA": "mlx5"}, fabric(tmp_path / "a", mlx5_0=up))) == []
    assert "mlx5_1:1" in bad(check_fabric(2, {}, fabric(tmp_path / "b", mlx5_0=up, mlx5_1=down)))[0].what
    assert bad(check_fabric(2, {}, fabric(tmp_path / "c", mlx5_0=down)))[0].level == "fail"
    assert "names mlx9" in bad(check_fabric(2, {"NCCL_IB_HCA": "=mlx9:1"}, fabric(tmp_path / "d", mlx5_0=up)))[0].what


def test_ports_and_proxies() -> None:
    assert bad(check_ports("32768\t60999\n")) == []
    assert "from 1024" in bad(check_ports("1024\t65535\n"))[0].what
    assert bad(check_proxies(1, {"http_proxy": "x"})) == []
    assert bad(check_proxies(2, {"http_proxy": "x", "no_proxy": "10.0.0.0/8"})) == []
    assert "no_proxy is not" in bad(check_proxies(2, {"http_proxy": "x"}))[0].what


def test_this_machines_disk_passes_and_the_probe_is_removed(tmp_path: Path) -> None:
    (found,) = check_shared(tmp_path / "not" / "there" / "yet")
    assert found.level == "ok" and list(tmp_path.iterdir()) == []


def test_a_disk_without_locks_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_LOCKER", "pass")
    (found,) = check_shared(tmp_path)
    assert found.level == "fail" and "a lock does not keep another process out" in found.what


def test_a_slow_disk_and_a_wrong_clock_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage._written

    def late(file: Path) -> tuple[float, float]:
        write(file)
        return 2.0, -60.0

    monkeypatch.setattr(storage, "_written", late)
    assert [f.check for f in bad(check_shared(tmp_path))] == ["shared folder", "clock"]


def test_a_folder_that_cannot_be_written_fails() -> None:
    assert bad(check_shared(Path("/proc/nothing")))[0].level == "fail"


def test_shared_memory(tmp_path: Path) -> None:
    assert bad(check_shm(0.001, tmp_path)) == []
    assert "cluster.object_store_gib" in bad(check_shm(1e9, tmp_path))[0].what
    assert bad(check_shm(1.0, tmp_path / "none"))[0].level == "fail"


def test_limits() -> None:
    many = {resource.RLIMIT_NOFILE: (100_000, 100_000), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    assert bad(check_limits(rdma=False, limit=many.__getitem__, environ={})) == []
    assert "RDMA registers memory" in bad(check_limits(rdma=True, limit=many.__getitem__, environ={}))[0].what
    few = {resource.RLIMIT_NOFILE: (1024, 2048), resource.RLIMIT_MEMLOCK: UNLIMITED}
    assert bad(check_limits(rdma=True, limit=few.__getitem__, environ={}))[0].level == "fail"
    raisable = {**few, resource.RLIMIT_NOFILE: (1024, 1 << 20)}
    assert bad(check_limits(rdma=True, limit=raisable.__getitem__, environ={}))[0].level == "warn"
    noted = [f.what for f in check_limits(rdma=False, limit=many.__getitem__, environ={"RAY_ADDRESS": "x"})]
    assert "RAY_ADDRESS is set" in noted


@pytest.mark.parametrize(("told", "level"), [("yes", "ok"), ("no", "warn"), (None, "note")])
def test_clock(told: str | None, level: str) -> None:
    assert [f.level for f in check_clock(lambda: told)] == [level]


def test_versions_that_do_not_fit_are_named() -> None:
    asked = ["pydantic<3,>=2.11", 'torch==2.13.0; extra == "train"', 'ray[default]==2.60.0; extra == "train"']
    good = {"pydantic": "2.12", "torch": "2.13.0+cu130", "ray": "2.60.0"}
    assert bad(check_packages(asked, good.get)) == []
    (found,) = bad(check_packages(asked, {**good, "ray": "2.50.0"}.get))
    assert "ray is 2.50.0, needs ==2.60.0" in found.what and "[train]" in found.fix
    (found,) = bad(check_packages(asked, {"pydantic": "2.12", "torch": "2.13.0"}.get))
    assert "ray is not installed" in found.what
    assert bad(check_packages(asked, {"pydantic": "2.12"}.get)) == []


def test_the_gravest_level_counts(tmp_path: Path) -> None:
    levels = [Finding("x", level, "") for level in ("ok", "note", "warn", "fail")]
    assert [worst(levels[: n + 1]) for n in range(4)] == ["ok", "note", "warn", "fail"]
    assert worst(examine(None, tmp_path)) != "fail"


def test_the_command_fails_when_a_job_would(tmp_path: Path) -> None:
    demo = str(Path(__file__).parents[2] / "configs/demo.yaml")
    done = nrl("doctor", demo, f"output={tmp_path}/out", "launch.accelerator=cpu", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["findings"]
    done = nrl("doctor", demo, f"output={tmp_path}/out", "cluster.object_store_gib=1000000", "launch.accelerator=cpu")
    assert done.returncode == 1 and "fix: lower it" in done.stdout


def test_an_unfit_host_starts_no_job_and_says_why(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    demo = Path(__file__).parents[2] / "configs/demo.yaml"
    spec.write_text(f"extends: {demo}\noutput: {tmp_path}/out\nlaunch: {{accelerator: cpu, devices_per_node: 1}}\n")
    done = nrl("node", str(spec), "cluster.object_store_gib=1000000")
    assert done.returncode == 1 and "is not fit for the job" in done.stderr and "fix: lower it" in done.stderr
    assert not (tmp_path / "out").exists()
