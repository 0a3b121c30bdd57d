"""Laws of the driver's end: its exit code is the job's, a signal it was told of is a saved stop, a lost host ends it in bounded time."""

from __future__ import annotations

import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_like.launch.node import driver as module
from nemo_rl_like.launch.node.driver import Driver

Start = Callable[[str, float], Driver]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a shell script in the driver's place, once it says that it is ready."""

    def make(script: str, lost_after_s: float = 60.0) -> Driver:
        program, ready = tmp_path / "driver", tmp_path / "ready"
        program.write_text(f"#!/bin/sh\n{script.replace('READY', f'touch {ready}')}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(module.sys, "executable", str(program))
        found = Driver(["run"], {"PATH": "/usr/bin:/bin"}, lost_after_s=lost_after_s)
        while "READY" in script and not ready.exists():
            time.sleep(0.02)
        return found

    return make


def ended(driver: Driver, seconds: float = 20.0) -> int:
    end = time.monotonic() + seconds
    while (code := driver.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    return code


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_its_exit_code_is_the_jobs(start: Start, code: int) -> None:
    assert ended(start(f"exit {code}", 60.0)) == code


def test_a_signal_that_it_was_told_of_is_a_stop_even_before_there_is_anything_to_save(start: Start) -> None:
    driver = start("READY; exec sleep 30", 60.0)
    driver.tell(signal.SIGUSR1)
    assert ended(driver) == 128 + signal.SIGUSR1 and driver.job_code(reach_workers=False) == 75


@pytest.mark.parametrize(("code", "expected"), [(1, 75), (143, 75), (0, 0), (2, 2), (75, 75)])
def test_a_driver_that_fails_after_sigterm_was_stopped_where_that_reaches_its_workers(
    start: Start, code: int, expected: int
) -> None:
    driver = start(f"trap 'exit {code}' TERM; READY; while true; do sleep 0.1; done", 60.0)
    driver.tell(signal.SIGTERM)
    assert ended(driver) == code
    assert (driver.job_code(reach_workers=False), driver.job_code(reach_workers=True)) == (code, expected)
    driver.lose("rank 1 was lost")
    assert driver.job_code(reach_workers=True) == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 1), (signal.SIGINT, 130)])
def test_an_exit_code_of_its_own_after_another_signal_is_the_jobs(start: Start, number: int, code: int) -> None:
    """SIGUSR1 and the stop file reach the driver alone; 130 is the second Ctrl-C, after which nothing was saved."""
    name = signal.Signals(number).name.removeprefix("SIG")
    driver = start(f"trap 'exit {code}' {name}; READY; while true; do sleep 0.1; done", 60.0)
    driver.tell(number)
    assert ended(driver) == code and driver.job_code(reach_workers=True) == code


def test_a_signal_that_nobody_told_it_of_is_a_failure(start: Start) -> None:
    driver = start("kill -KILL $$", 60.0)
    assert ended(driver) == 128 + signal.SIGKILL and driver.job_code(reach_workers=True) == 128 + signal.SIGKILL


def test_a_lost_host_leaves_it_time_to_end_by_itself(start: Start) -> None:
    driver = start("READY; sleep 1; exit 3", 60.0)
    driver.lose("rank 1 was lost")
    assert ended(driver) == 3


def test_after_a_lost_host_it_is_told_to_save_and_then_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAVE_S", 1.0)
    driver = start("trap 'echo saving' TERM; READY; while true; do sleep 0.1; done", 0.2)
    driver.lose("rank 1 was lost")
    assert ended(driver) == 128 + signal.SIGKILL
