"""Laws of a run's end: however the driver ends, nothing of the run is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_like.cluster.errors import ClusterStartError
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.cluster.watchdog import command_line, kill_run, processes_of_run, segments_of
from nemo_rl_like.spec.cluster import ClusterSpec

DRIVER = """
import signal, sys, time
from pathlib import Path
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.spec.experiment import ClusterSpec

asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append("TERM"))
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append("USR1"))
with RaySession.start(ClusterSpec(object_store_gib=0.1), Path(sys.argv[1])) as session:
    group = WorkerGroup.start("policy", session=session, axes={"n": 2}, devices=0)
    group.host("child", "tests.cluster.services:Parent")
    print("ready", flush=True)
    sys.stdin.readline()
    group.call("child", "ping", deadline_s=30)
    print(*asked, flush=True)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver with two workers, each with a child process, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    run = described(tmp_path)
    assert not kill_run(run["run_id"], run["temp_dir"])


def described(output: Path) -> dict[str, str]:
    return json.loads((output / "logs" / "session.json").read_text())


def assert_nothing_left(run: dict[str, str], segments: set[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := processes_of_run(run["run_id"], run["temp_dir"]):
        assert time.monotonic() < deadline, [command_line(pid) for pid in left]
        time.sleep(0.2)
    while os.path.exists(run["temp_dir"]):
        assert time.monotonic() < deadline, "Ray's folder is still there"
        time.sleep(0.2)
    while left_segments := [path for path in segments if os.path.exists(path)]:
        assert time.monotonic() < deadline, left_segments
        time.sleep(0.2)


def kill_tree(root: int) -> None:
    """SIGKILL a process and all its descendants, as a batch system does."""
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    os.kill(root, signal.SIGKILL)
    for child in children:
        if os.path.exists(f"/proc/{child}"):
            kill_tree(int(child))


@pytest.mark.service
@pytest.mark.parametrize("whole_tree", [False, True])
def test_nothing_survives_a_driver_that_is_killed(
    driver: subprocess.Popen[str], tmp_path: Path, whole_tree: bool
) -> None:
    run = described(tmp_path)
    segments = segments_of(processes_of_run(run["run_id"], run["temp_dir"]))
    assert len([path for path in segments if "psm_" in path]) == 2, "each worker has one that nobody else removes"
    names = " ".join(command_line(pid) for pid in processes_of_run(run["run_id"], run["temp_dir"]))
    for part in ("raylet", "gcs_server", "WorkerHost", "sleep 3000"):
        assert part in names, f"{part} must be found by the run id, or this test shows nothing"
    if whole_tree:
        time.sleep(1)  # the watchdog needs a moment to see whose a new segment is
        kill_tree(driver.pid)
    else:
        driver.send_signal(signal.SIGKILL)
    assert_nothing_left(run, segments, 15)


@pytest.mark.service
def test_signals_to_the_process_group_reach_the_driver_alone(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    run = described(tmp_path)
    segments = segments_of(processes_of_run(run["run_id"], run["temp_dir"]))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.killpg(driver.pid, number)
    time.sleep(1)
    out, _ = driver.communicate("go\n", timeout=60)
    assert sorted(out.split()) == ["TERM", "USR1"]
    assert driver.returncode == 0
    assert_nothing_left(run, segments, 5)


def test_kill_run_takes_the_run_and_nobody_else() -> None:
    mine = subprocess.Popen(["sleep", "100"], env={**os.environ, "NRL_RUN_ID": "test-mine"})
    other = subprocess.Popen(["sleep", "100"], env={**os.environ, "NRL_RUN_ID": "test-mine-too"})
    try:
        assert processes_of_run("test-mine", "/no/such/folder") == {mine.pid}
        assert kill_run("test-mine", "/no/such/folder") == set()
        assert mine.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        mine.kill()
        other.kill()
        mine.wait()
        other.wait()


HIDDEN = """
import ctypes, multiprocessing, subprocess, sys, time
made = multiprocessing.get_context("spawn").Lock()
name = made._semlock.name
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env={})
print(child.pid, name, flush=True)
time.sleep(100)
"""


def test_a_child_that_hides_its_environment_and_a_semaphore_are_found() -> None:
    """vLLM's processes rename themselves, which overwrites what /proc shows of their environment."""
    mine = subprocess.Popen(
        [sys.executable, "-c", HIDDEN],
        env={**os.environ, "NRL_RUN_ID": "test-hidden"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert mine.stdout is not None
    child, name = mine.stdout.readline().split()
    semaphore = f"/dev/shm/sem.{name.removeprefix('/')}"
    found = processes_of_run("test-hidden", "/no/such/folder")
    assert {mine.pid, int(child)} <= found
    assert semaphore in segments_of(found)
    assert kill_run("test-hidden", "/no/such/folder") == set()
    mine.wait(5)
    assert not os.path.exists(semaphore) and not os.path.exists(f"/proc/{child}/exe")


TRY_TOKEN = """
import os, sys, tempfile
from pathlib import Path
from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.spec.cluster import ClusterSpec
import ray
if __name__ == "__main__":
    try:
        with RaySession.start(ClusterSpec(**eval(sys.argv[2])), Path(sys.argv[1])) as session:
            print("gcs", ray.get_runtime_context().gcs_address, flush=True)
            print("value", ray.get(ray.remote(lambda: 5).remote()), flush=True)
            print("mode", *(oct(p.stat().st_mode) for p in (next(session.temp_dir.glob("token")), session.temp_dir)), flush=True)
            left = ray.get(ray.remote(lambda: tempfile.mkstemp()[1]).remote())
            print("left", Path(left).is_relative_to(session.temp_dir), left, flush=True)
            sys.stdin.readline()
    except SpecError as error:
        print("refused", error)
"""
STRANGER = "import ray; ray.init(address='{}', logging_level='ERROR'); print('inside', ray.nodes())"


def without_auth(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")} | more


def test_a_run_of_its_own_has_a_secret_and_a_stranger_on_the_host_is_kept_out(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRY_TOKEN, str(tmp_path), "{}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=without_auth(), **{**pipes, "stderr": subprocess.DEVNULL}) as owner:
        told = dict(owner.stdout.readline().split(maxsplit=1) for _ in range(4))
        try:
            assert told["value"].strip() == "5" and told["mode"].split() == ["0o100600", "0o40700"]
            within, left = told["left"].split()
            assert within == "True" and os.path.exists(left)
            code = STRANGER.format(told["gcs"].strip())
            tries = [
                subprocess.Popen(
                    [sys.executable, "-c", code], env=without_auth(RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN="0" * 64), **pipes
                )
                for mode in ("disabled", "token")
            ]
            for tried in tries:
                out, error = tried.communicate(timeout=120)
                assert tried.returncode != 0 and "inside" not in out and "token" in error.lower()
        finally:
            owner.communicate("\n", timeout=60)
    assert not os.path.exists(left)


def test_a_mode_that_came_too_late_is_refused_with_the_fix(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRY_TOKEN, str(tmp_path), "{'auth': 'disabled'}"]
    done = subprocess.run(command, env=without_auth(), capture_output=True, text=True, timeout=120)
    assert "refused `cluster.auth` is disabled, but ray was imported with RAY_AUTH_MODE=token; set" in done.stdout


def test_a_cluster_is_joined_with_its_token_or_not_at_all(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRY_TOKEN, str(tmp_path), "{'address': '127.0.0.1:9', 'start_timeout_s': 3}"]
    done = subprocess.run(command, env=without_auth(), capture_output=True, text=True, timeout=120)
    assert "RAY_AUTH_TOKEN_PATH is not set; point it at a file" in done.stdout


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:9"])
def test_an_address_where_no_ray_is_ends_with_a_clear_error(tmp_path: Path, address: str) -> None:
    started = time.monotonic()
    with pytest.raises(ClusterStartError, match=r"`cluster\.address`"):
        RaySession.start(ClusterSpec(address=address, start_timeout_s=5), tmp_path)
    assert time.monotonic() - started < 10
    assert "NRL_RUN_ID" not in os.environ
