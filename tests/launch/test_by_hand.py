"""Jobs without a scheduler: hosts of network namespaces that a person starts one by one."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from nemo_rl_like.data.tokenizer import character_tokenizer
from tests.launch.hosts import Host, connected
from tests.launch.jobs import steps_done, wait_until, write_job
from tests.stages.killing import finish, outcome
from tests.stages.test_killed_vllm import Run
from tests.tiny_folders import save_llama

pytestmark = pytest.mark.service


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with connected(2) as found:
        yield found


class HandMade:
    """Two hosts of one job, started by hand."""

    def __init__(self, hosts: list[Host], spec: Path, folder: Path, number: int, *overrides: str) -> None:
        self.logs = [folder / f"host-{number}-{i}.log" for i in range(2)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.processes.append(hosts[0].start(["node", str(spec), *overrides], self.logs[0]))
        wait_until(lambda: self._join() is not None, lambda: self.text(0))
        self.processes.append(
            hosts[1].start(["node", str(spec), "--join", str(self._join()), *overrides], self.logs[1])
        )

    def _join(self) -> str | None:
        found = re.search(r"--join (\S+)", self.text(0))
        return found.group(1) if found else None

    def text(self, i: int) -> str:
        return self.logs[i].read_text() if self.logs[i].exists() else ""

    def ended(self, seconds: float) -> list[int]:
        return [process.wait(seconds) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, Path]:
    """A spec for two hosts with a token beside it, and its output folder."""
    output = tmp_path / "run"
    spec = write_job(tmp_path, output, steps=6, addresses={})
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(secrets.token_hex(32))
    return spec, output


@pytest.mark.slow
def test_a_host_that_is_cut_off_and_returns_ends_the_run_and_a_resumed_one_equals_never_cut(
    hosts: list[Host], job: tuple[Path, Path], tmp_path: Path
) -> None:
    """Each side ends in bounded time with an error that names the other; the second start goes on from the last checkpoint."""
    spec, output = job
    first = HandMade(hosts, spec, tmp_path, 1)
    try:
        wait_until(lambda: steps_done(output) >= 3, lambda: first.text(0) + first.text(1))
        hosts[1].cut()
        cut_at = time.monotonic()
        codes = first.ended(240)
        assert time.monotonic() - cut_at < 240 and 0 not in codes, codes
        assert "was lost: no word for 20 s" in first.text(0)
        assert "the head was lost: no word for 20 s" in first.text(1)
    finally:
        first.kill()
    hosts[1].mend()
    assert steps_done(output) < 6, "it must be cut in the middle, or this test shows nothing"
    second = HandMade(hosts, spec, tmp_path, 2)
    try:
        assert second.ended(240) == [0, 0], second.text(0)[-3000:]
    finally:
        second.kill()
    alone = tmp_path / "alone"
    reference = write_job(tmp_path, alone, steps=6, addresses={})
    assert finish(["run", str(reference), "cluster.devices=2"], tmp_path / "alone.log") == 0
    assert outcome(output) == outcome(alone)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_vllm_on_two_hosts_gets_its_weights_over_the_network_and_the_run_equals_one_hosts(
    hosts: list[Host], tmp_path: Path
) -> None:
    """One replica a host. The far one reads no memory of the trainer's: its host fetches the weights, once a sync."""
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(secrets.token_hex(32))
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained(save_llama(tmp_path / "model", len(tokenizer), positions=32, head_dim=32))
    model = f"model={{path: {tmp_path / 'model'}}}"
    both, alone = tmp_path / "both", tmp_path / "alone"
    made = HandMade(
        hosts,
        write_job(tmp_path, both, addresses={}, engine="vllm, replicas: 2"),
        tmp_path,
        1,
        model,
        "launch.lost_after_s=60",
    )
    try:
        assert made.ended(500) == [0, 0], made.text(0)[-3000:]
    finally:
        made.kill()
    told = sorted(path.read_text().count("fetched version") for path in both.glob("**/engine-*.log"))
    assert told == [0, 5], "one replica's host fetches, at the start and after each step, or this test shows nothing"
    reference = write_job(tmp_path, alone, addresses={}, engine="vllm, replicas: 2")
    assert finish(["run", str(reference), model, "cluster.devices=2"], tmp_path / "alone.log", 500) == 0
    far, near = Run.of(both), Run.of(alone)
    assert far.samples == near.samples
    torch.testing.assert_close(far.log_probs(near.episodes), near.log_probs(near.episodes), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_driver_that_is_killed_ends_the_job_on_every_host_and_leaves_nothing(
    hosts: list[Host], job: tuple[Path, Path], tmp_path: Path
) -> None:
    spec, output = job
    made = HandMade(hosts, spec, tmp_path, 1)
    try:
        wait_until(lambda: steps_done(output) >= 1, lambda: made.text(0) + made.text(1))
        (head,) = [p for p in psutil.Process(made.processes[0].pid).children() if "run" in p.cmdline()]
        parts = [p for process in made.processes for p in psutil.Process(process.pid).children(recursive=True)]
        assert any("raylet" in p.name() for p in parts), "or this test shows nothing"
        head.kill()
        assert made.ended(60) == [128 + signal.SIGKILL] * 2, made.text(0)[-2000:] + made.text(1)[-2000:]
        _, left = psutil.wait_procs(parts, timeout=20)
        assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        made.kill()


@pytest.mark.slow
def test_a_host_that_nobody_joins_says_who_is_missing(
    hosts: list[Host], job: tuple[Path, Path], tmp_path: Path
) -> None:
    spec, output = job
    process = hosts[0].start(["node", str(spec), "launch.start_timeout_s=40"], tmp_path / "log")
    assert process.wait(120) == 1
    text = (tmp_path / "log").read_text()
    assert "after 40 s 1 of 2 hosts are there (this host), missing: 1 more" in text
    assert not output.exists(), "nothing was started that costs"
