"""Laws of a host's Ray: a start that fails is made again a bounded number of times, and leaves nothing; one that was up is not made again."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl_like.launch.node import daemons as module
from nemo_rl_like.launch.node.daemons import RayDaemons, RayEnded, Resources
from nemo_rl_like.launch.node.ports import Block
from tests.launch import ray_double


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[RayDaemons]:
    made = RayDaemons(tmp_path / "ray.log")
    yield made
    made.stop()
    assert not any(lives(pid) for pid, _ in starts(tmp_path)), "nothing is left"


def begin(
    daemons: RayDaemons, folder: Path, monkeypatch: pytest.MonkeyPatch, failures: int, seconds: float = 60.0
) -> None:
    """Start the double, which fails so often."""
    monkeypatch.setattr(module, "PROGRAM", (sys.executable, ray_double.__file__, str(folder), str(failures)))
    resources = Resources(cpus=1, gpus=0, object_store_bytes=1 << 20)
    daemons.start(Block(12000, 12399), "127.0.0.1", resources, {"PATH": "/usr/bin"}, None, seconds=seconds)


def wait_until_up(daemons: RayDaemons) -> None:
    end = time.monotonic() + 60
    while not daemons.up:
        daemons.check()
        assert time.monotonic() < end
        time.sleep(0.05)


def starts(folder: Path) -> list[tuple[int, bool]]:
    """Of each start: the process that it left, and whether it found an empty folder."""
    lines = (folder / "starts").read_text().splitlines()
    return [(int(line.split()[0]), line.endswith("True")) for line in lines]


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_start_that_fails_is_made_again_from_nothing_and_says_why(
    daemons: RayDaemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin(daemons, tmp_path, monkeypatch, failures=1)
    with caplog.at_level(logging.WARNING):
        wait_until_up(daemons)
    (first, _), (second, found_nothing) = starts(tmp_path)
    assert found_nothing and not lives(first) and lives(second)
    (record,) = caplog.records
    assert "in start 1 of 3, trying again (exit code 1)" in record.getMessage()
    assert "timed out during startup (1)" in record.getMessage()


def test_after_three_starts_it_gives_up(daemons: RayDaemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(daemons, tmp_path, monkeypatch, failures=9)
    with pytest.raises(RayEnded, match=r"start 3 of 3 \(exit code 1\)"):
        wait_until_up(daemons)
    assert len(starts(tmp_path)) == 3


def test_after_its_deadline_no_further_start_is_made(
    daemons: RayDaemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(daemons, tmp_path, monkeypatch, failures=9, seconds=0.0)
    with pytest.raises(RayEnded, match="start 1 of 3"):
        wait_until_up(daemons)


def test_one_that_was_up_and_ends_is_an_error(
    daemons: RayDaemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(daemons, tmp_path, monkeypatch, failures=0)
    wait_until_up(daemons)
    daemons.check()
    assert daemons._process is not None
    daemons._process.kill()
    daemons._process.wait()
    with pytest.raises(RayEnded, match="start 1 of 3"):
        daemons.check()
