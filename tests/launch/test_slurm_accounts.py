"""Jobs of a real Slurm that keeps accounts in a real slurmdbd: what is told of them once slurmctld has forgotten them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from nemo_rl_like.launch.slurm.accounting import Accounts, accounts_of
from tests.launch.jobs import nrl, wait_until
from tests.launch.slurm_accounts import ACCOUNT, QOS
from tests.launch.slurm_cluster import Cluster, running
from tests.launch.slurm_stub import NAP_S, Stub

pytestmark = pytest.mark.service

GPUS = ("launch.accelerator=gpu", "launch.devices_per_node=8")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm"), accounts=True) as cluster:
        yield cluster


def sacct(slurm: Cluster, job: str, columns: str) -> list[str]:
    """The last start of a job, by sacct."""
    (line,) = slurm.call("sacct", "--noheader", "-X", "-P", "-j", job, "-o", columns).splitlines()
    return line.split("|")


def hours_of(slurm: Cluster, stub: Stub, job: str, monkeypatch: pytest.MonkeyPatch) -> Accounts:
    monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
    found = accounts_of(job, stub.jobs.stat().st_mtime)
    assert isinstance(found, Accounts), found
    return found


def test_a_job_that_slurmctld_has_forgotten_is_told_by_accounting(stub: Stub) -> None:
    """State, exit code, account, quality of service and GPU hours; the log lies in the submission's folder."""
    stub.does("nap")
    slurm = stub.slurm
    job = stub.started(stub.spec(f"  retries: 0\n  slurm: {{account: {ACCOUNT}, qos: {QOS}}}\n"), *GPUS)
    slurm.ended(job)
    # Of a short job accounting may get the end before the start, which says the quality.
    kept = lambda: sacct(slurm, job, "State,QOS")
    wait_until(lambda: kept() == ["FAILED", QOS], lambda: str(kept()))
    slurm.forget_jobs()
    state, elapsed, account, qos = sacct(slurm, job, "State,ElapsedRaw,Account,QOS")
    assert (state, account, qos) == ("FAILED", ACCOUNT, QOS) and int(elapsed) >= NAP_S
    told = nrl("status", str(stub.output), environ=stub.environ)
    hours = int(elapsed) * 8 / 3600
    assert f"slurm job {job}: failed (FAILED, exit code 3:0; {hours:.2f} GPU hours)" in told.stdout, told.stderr
    logged = nrl("logs", str(stub.output), "-f", environ=stub.environ)
    assert "0.0: node" in logged.stdout and logged.returncode == 0, logged.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("launch.slurm.account=nobody",), "Invalid account"),
        (("launch.slurm.qos=nothing",), "Invalid qos"),
    ],
)
def test_an_account_and_a_quality_that_slurm_does_not_know_are_refused_in_its_words(
    stub: Stub, changes: tuple[str, ...], words: str
) -> None:
    done = stub.submit(stub.spec(), *changes)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert list(stub.jobs.glob("0*")) == [], "nothing is left of a submission that Slurm refused"


@pytest.mark.slow
def test_gpu_hours_are_those_of_every_start(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is requeued has a row a start, and `sacct` shows the last one unless asked."""
    stub.does("nap")
    before = time.monotonic()
    job = stub.started(stub.spec("  retries: 1\n", nodes=2), *GPUS)
    wait_until(lambda: stub.slurm.job(job)["Restarts"] == "1", lambda: str(stub.slurm.job(job)))
    stub.restart(job, "nap")
    stub.slurm.ended(job)
    starts, used_s = 2, time.monotonic() - before
    wait_until(lambda: sacct(stub.slurm, job, "State") == ["FAILED"], lambda: "accounting is late")
    found = hours_of(stub.slurm, stub, job, monkeypatch)
    assert found.ends == (("FAILED", "3:0"),) and found.gpu_hours is not None
    last = int(sacct(stub.slurm, job, "ElapsedRaw")[0])
    assert 2 * 8 * (last + NAP_S) <= found.gpu_hours * 3600 <= 2 * 8 * used_s
    assert len(stub.heard()) == 2 * starts


@pytest.mark.slow
def test_a_cancelled_job_that_never_started_has_no_log_and_says_so(stub: Stub) -> None:
    slurm = stub.slurm
    slurm.call("scontrol", "update", "partition=batch", "state=down")
    try:
        job = stub.started(stub.spec())
        assert nrl("cancel", str(stub.output), environ=stub.environ).returncode == 0
    finally:
        slurm.call("scontrol", "update", "partition=batch", "state=up")
    wait_until(lambda: sacct(slurm, job, "State")[0].startswith("CANCELLED"), lambda: "accounting is late")
    slurm.forget_jobs()
    logged = nrl("logs", str(stub.output), environ=stub.environ)
    assert logged.returncode == 1 and f"has no log: slurm job {job} is cancelled (CANCELLED" in logged.stderr


@pytest.mark.slow
def test_minutes_after_its_end_slurmctld_forgets_a_job_and_accounting_does_not(stub: Stub) -> None:
    """The real `MinJobAge`, set to two seconds; slurmctld looks once a minute."""
    slurm = stub.slurm
    conf = slurm.folder / "slurm.conf"
    kept = conf.read_text()
    stub.does("0")
    try:
        conf.write_text(re.sub(r"MinJobAge=\d+", "MinJobAge=2", kept))
        slurm.call("scontrol", "reconfigure")
        done = stub.submit(stub.spec(), "--wait")
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: slurm.call("squeue", "--noheader", "--states=all") == "", lambda: slurm.call("squeue"))
    finally:
        conf.write_text(kept)
        slurm.call("scontrol", "reconfigure")
    told = nrl("status", str(stub.output), environ=stub.environ)
    assert ": done (COMPLETED, exit code 0:0)" in told.stdout, told.stdout + told.stderr
