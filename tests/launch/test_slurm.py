"""Jobs on a real Slurm of four hosts: submitted, refused, stopped in the middle, started again, cancelled."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_like.launch.node.hostlist import expand
from tests.launch.jobs import nrl, steps_done, wait_until, write_job
from tests.launch.slurm_cluster import ADDRESSES, Cluster, running
from tests.stages.killing import finish, outcome

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def log_of(output: Path, number: int = 1) -> str:
    path = Path(f"{output}.jobs") / f"{number:04d}" / "log.txt"
    return path.read_text()[-4000:] if path.is_file() else "no log"


def submit(slurm: Cluster, spec: Path, *further: str) -> str:
    """Submit; the job's id."""
    done = nrl("submit", str(spec), "--to", "slurm", *further, environ=slurm.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("slurm job ")[1].split()[0]


def never_stopped(folder: Path, steps: int) -> Path:
    """The output of the same run on this host alone, from start to end."""
    output = folder / "alone"
    spec = write_job(folder, output, steps=steps, addresses={})
    assert finish(["run", str(spec), "cluster.devices=2"], folder / "alone.log") == 0, (
        folder / "alone.log"
    ).read_text()[-2000:]
    return output


def test_host_lists_are_written_out_as_slurm_does(slurm: Cluster) -> None:
    for text in ("node[1-4]", "a[08-11,3],c", "x[0-1]y[2-3]", "plain"):
        assert expand(text) == slurm.call("scontrol", "show", "hostnames", text).split()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("  slurm: {partition: nowhere}\n", "invalid partition"),
        ("  cpus_per_node: 64\n", "Requested node configuration is not available"),
        ("  slurm: {reservation: mine}\n", "(?i)reservation"),
    ],
)
def test_what_slurm_itself_refuses_is_shown_in_its_words(
    slurm: Cluster, tmp_path: Path, extra: str, words: str
) -> None:
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES, extra=extra)
    done = nrl("submit", str(spec), "--to", "slurm", "--dry-run", environ=slurm.environ)
    assert done.returncode == 1 and re.search(words, done.stderr), done.stderr
    assert not (tmp_path / "run.jobs").exists()


def test_a_waiting_job_is_refused_a_second_time_and_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES, nodes=2)
    slurm.call("scontrol", "update", "partition=batch", "state=down")
    try:
        job = submit(slurm, spec)
        again = nrl("submit", str(spec), "--to", "slurm", environ=slurm.environ)
        assert again.returncode == 1 and f"is queued ({tmp_path}/run.jobs/0001, slurm job {job})" in again.stderr
        assert nrl("cancel", str(tmp_path / "run"), environ=slurm.environ).returncode == 0
        told = nrl("status", str(tmp_path / "run"), environ=slurm.environ)
        assert f"slurm job {job}: cancelled" in told.stdout, told.stdout + told.stderr
    finally:
        slurm.call("scontrol", "update", "partition=batch", "state=up")


def test_two_hosts_told_to_save_in_the_middle_equal_one_that_never_stopped(slurm: Cluster, tmp_path: Path) -> None:
    """The batch script hears USR1, the driver saves, Slurm starts the job again, and it goes on by itself."""
    output = tmp_path / "run"
    job = submit(slurm, write_job(tmp_path, output, steps=6, addresses=ADDRESSES))
    wait_until(lambda: steps_done(output) >= 2, lambda: log_of(output))
    token = output.with_name("run.jobs") / "0001" / "token"
    assert token.stat().st_mode & 0o777 == 0o600 and token.read_text() not in log_of(output)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: slurm.job(job).get("Restarts") == "1", lambda: log_of(output))
    done_before = steps_done(output)
    assert 2 <= done_before < 6, "it must be stopped in the middle, or this test shows nothing"
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    ended = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    assert ended["JobState"] == "COMPLETED", log_of(output)
    assert outcome(output) == outcome(never_stopped(tmp_path, 6))
    told = nrl("status", str(output), environ=slurm.environ).stdout
    assert "done (COMPLETED, exit code 0:0)" in told and "rl: done" in told
    assert "resume" in "".join(nrl("logs", str(output), environ=slurm.environ).stdout)
    assert subprocess.run(["pgrep", "-f", str(token.parent)], capture_output=True).returncode == 1, "nothing is left"
