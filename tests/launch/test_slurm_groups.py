"""Heterogeneous jobs of a real Slurm (`launch.generation`), with a stub in the place of `nrl node`: both groups of hosts start, end and start again as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.jobs import nrl, wait_until
from tests.launch.slurm_cluster import Cluster
from tests.launch.slurm_stub import Stub

pytestmark = [pytest.mark.service, pytest.mark.slow]

GROUPS = "  generation: {nodes: 1, partition: early}\n  slurm: {partition: late}\n"
"""Two hosts that train, and one that generates."""


def spec_of(stub: Stub, extra: str = "") -> Path:
    return stub.spec(GROUPS + extra, nodes=2, engine="vllm")


def all_in(slurm: Cluster, job: str, state: str) -> None:
    wait_until(lambda: slurm.states(job) == [state] * 2, lambda: str(slurm.states(job)), seconds=90)


def heard(stub: Stub, count: int) -> None:
    wait_until(lambda: len(stub.heard()) == count, lambda: str(stub.heard()))


def test_a_running_job_that_is_cancelled_saves_and_both_groups_stay_ended(stub: Stub) -> None:
    stub.does("save")
    job = stub.started(spec_of(stub))
    heard(stub, 3)
    assert nrl("cancel", str(stub.output), environ=stub.environ).returncode == 0
    all_in(stub.slurm, job, "FAILED")
    told = nrl("status", str(stub.output), environ=stub.environ).stdout
    assert "cancelled (FAILED, NonZeroExitCode, exit code 75:0" in told and stub.slurm.job(job)["Restarts"] == "0"


def test_a_job_that_hears_nothing_is_ended_by_the_second_cancel(stub: Stub) -> None:
    stub.does("deaf")
    job = stub.started(spec_of(stub))
    heard(stub, 3)
    for _ in range(2):
        assert nrl("cancel", str(stub.output), environ=stub.environ).returncode == 0
    all_in(stub.slurm, job, "CANCELLED")
    assert ": cancelled (CANCELLED" in nrl("status", str(stub.output), environ=stub.environ).stdout


def test_a_waiting_job_is_cancelled_with_both_groups(stub: Stub) -> None:
    stub.slurm.call("scontrol", "update", "partition=early", "state=down")
    try:
        job = stub.started(spec_of(stub))
        assert ": queued (PENDING" in nrl("status", str(stub.output), environ=stub.environ).stdout
        assert nrl("cancel", str(stub.output), environ=stub.environ).returncode == 0
        all_in(stub.slurm, job, "CANCELLED")
    finally:
        stub.slurm.call("scontrol", "update", "partition=early", "state=up")


def test_a_saved_job_is_started_again_with_both_groups(stub: Stub) -> None:
    stub.does("save")
    job = stub.started(spec_of(stub))
    heard(stub, 3)
    stub.slurm.call("scancel", "--batch", "--signal=USR1", job)
    stub.restart(job, "0")
    all_in(stub.slurm, job, "COMPLETED")
    assert sorted(line.split(":")[0] for line in stub.heard()) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]


def test_a_preempted_job_is_started_again_with_both_groups(stub: Stub) -> None:
    """One group's host is wanted; both are told, save, and wait together."""
    stub.does("heed")
    where = "  generation: {nodes: 1, partition: spare}\n  slurm: {partition: spare}\n  retries: 0\n"
    job = stub.started(stub.spec(where, nodes=2, engine="vllm"))
    heard(stub, 3)
    (host,) = {line.split("NodeList=node")[1][0] for line in lines_of(stub.slurm, job) if "HetJobOffset=1" in line}
    words = ("-p", "urgent", "-w", f"node{host}", "--exclusive", "-o", str(stub.folder / "urgent.log"))
    urgent = stub.slurm.call("sbatch", "--parsable", *words, "--wrap", "sleep 1").strip()
    stub.slurm.wait(urgent, "COMPLETED")
    stub.restart(job, "0")
    all_in(stub.slurm, job, "COMPLETED")
    assert not (stub.jobs / "0001" / "failures").exists() and len(stub.heard()) == 6


@pytest.mark.parametrize("lost", ["node1", "node4"])
def test_a_job_whose_host_fails_is_started_again_with_both_groups(stub: Stub, lost: str) -> None:
    """A host of either group, gone with its slurmd; Slurm itself starts the job again."""
    stub.does("heed")
    job = stub.started(spec_of(stub, "  retries: 0\n"))
    heard(stub, 3)
    stub.slurm.lose_host(lost)
    try:
        all_in(stub.slurm, job, "PENDING")
    finally:
        stub.slurm.return_host(lost)
    stub.restart(job, "0")
    all_in(stub.slurm, job, "COMPLETED")


def test_stages_are_jobs_of_both_groups_and_after_one_that_failed_the_next_never_starts(stub: Stub) -> None:
    stub.does("0")
    spec = spec_of(stub)
    spec.write_text(spec.read_text() + "  - {kind: evaluate}\n")
    done = stub.submit(spec, "--stages-as-jobs", "--wait")
    assert done.returncode == 0 and done.stdout.count(": done (COMPLETED") == 2, done.stdout + done.stderr
    assert [stub.slurm.job(job_of(stub, i))["JobState"] for i in (1, 2)] == ["COMPLETED"] * 2
    stub.does("2")
    broken = stub.submit(spec, "--stages-as-jobs", "--wait")
    assert broken.returncode == 2 and f"{stub.jobs}/0004: cancelled (CANCELLED" in broken.stdout, (
        broken.stdout + broken.stderr
    )
    all_in(stub.slurm, job_of(stub, 4), "CANCELLED")


def lines_of(slurm: Cluster, job: str) -> list[str]:
    """`scontrol`'s line of each group."""
    return slurm.call("scontrol", "-o", "show", "job", job).splitlines()


def job_of(stub: Stub, number: int) -> str:
    """Id of a submission's job."""
    told = nrl("status", str(stub.jobs / f"{number:04d}"), "--json", environ=stub.environ).stdout
    return told.split('"job": "')[1].split('"')[0]
