"""Jobs of a real Slurm that loses its hosts to a job of higher priority: told in time, saved, started again, equal to one that was never preempted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.launch.jobs import nrl, steps_done, wait_until, write_job
from tests.launch.slurm_cluster import ADDRESSES, NODES, Cluster, running
from tests.launch.slurm_stub import Stub, start_now
from tests.launch.test_slurm import log_of, never_stopped, submit
from tests.stages.killing import outcome

pytestmark = [pytest.mark.service, pytest.mark.slow]

STEPS = 8
HELD = """\
    import pathlib, time
    while pathlib.Path(__file__).with_name("hold").exists():
        time.sleep(0.1)
"""
"""A reward that waits while a file is there, so that Slurm finds the run in the middle of a step on any host."""


def preempt(slurm: Cluster, folder: Path) -> str:
    """Submit a job that takes every host; its id."""
    words = ("-p", "urgent", f"-N{NODES}", "--exclusive", "-o", str(folder / "urgent.log"))
    return slurm.call("sbatch", "--parsable", *words, "--wrap", "date +%s; sleep 1").strip()


def took_the_hosts(slurm: Cluster, urgent: str, job: str) -> None:
    """The urgent job has run to its end, and the other waits meanwhile."""
    slurm.wait(urgent, "RUNNING", "COMPLETED")
    assert slurm.job(job)["JobState"] == "PENDING", slurm.job(job)
    slurm.wait(urgent, "COMPLETED")


def test_a_preempted_job_that_saves_in_its_grace_time_is_no_failed_one(stub: Stub) -> None:
    stub.does("heed")
    job = stub.started(stub.spec("  slurm: {partition: spare}\n  retries: 0\n", nodes=2))
    wait_until(lambda: len(stub.heard()) == 2, lambda: str(stub.heard()))
    urgent = preempt(stub.slurm, stub.folder)
    took_the_hosts(stub.slurm, urgent, job)
    stub.restart(job, "0")
    ended = stub.slurm.ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert not (stub.jobs / "0001" / "failures").exists()
    assert sorted(line.split(":")[0] for line in stub.heard()) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_preempted_job_that_its_cluster_ends_says_so_and_is_resubmitted(stub: Stub) -> None:
    """`PreemptMode=CANCEL` and no grace time: the script is ended before the step has saved."""
    stub.does("late")
    job = stub.started(stub.spec("  slurm: {partition: ended}\n"))
    wait_until(lambda: len(stub.heard()) == 1, lambda: str(stub.heard()))
    urgent = preempt(stub.slurm, stub.folder)
    stub.slurm.wait(job, "PREEMPTED")
    stub.slurm.wait(urgent, "COMPLETED")
    told = nrl("status", str(stub.output), environ=stub.environ).stdout
    assert "failed (PREEMPTED" in told and "`nrl resubmit` goes on" in told, told
    stub.does("0")
    again = nrl("resubmit", str(stub.output), "--wait", environ=stub.environ)
    assert again.returncode == 0 and f"{stub.jobs}/0002: done" in again.stdout, again.stdout + again.stderr


def test_a_job_that_is_preempted_while_it_is_cancelled_stays_ended(stub: Stub) -> None:
    stub.does("deaf")
    job = stub.started(stub.spec())
    wait_until(lambda: len(stub.heard()) == 1, lambda: str(stub.heard()))
    assert nrl("cancel", str(stub.output), environ=stub.environ).returncode == 0
    took_the_hosts(stub.slurm, preempt(stub.slurm, stub.folder), job)
    stub.restart(job, "0")
    ended = stub.slurm.ended(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "75:0") and len(stub.heard()) == 1
    assert "cancelled (FAILED" in nrl("status", str(stub.output), environ=stub.environ).stdout


@pytest.mark.parametrize("partition", ["spare", "batch"])
def test_a_preempted_run_saves_and_equals_one_that_never_was(slurm: Cluster, tmp_path: Path, partition: str) -> None:
    """With a grace time, and with the 30 s of `KillWait` alone, at whose beginning Slurm ends the script, and with it the step's way to the log."""
    preempt_in_the_middle(slurm, tmp_path, partition)
    logged = log_of(tmp_path / "run", characters=20000)
    assert "stage rl: resume (stopped half-way)" in logged, "it saved, and was not killed"
    assert ("will save a checkpoint after this step and stop" in logged) == (partition == "spare")


def test_a_run_whose_workers_are_told_too_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """SIGTERM ends the workers at once: the driver fails, and that is no failure of the job."""
    (tmp_path / "slurm").mkdir()
    with running(tmp_path / "slurm", tracking="linuxproc") as slurm:
        preempt_in_the_middle(slurm, tmp_path, "spare", workers_end_s=5.0)
    assert "after SIGTERM, which may have reached its workers: that is a stop" in log_of(
        tmp_path / "run", characters=100000
    )


def preempt_in_the_middle(slurm: Cluster, folder: Path, partition: str, workers_end_s: float = 0.0) -> None:
    """A run of two hosts that another job interrupts in a step, to its end; it equals one that never stopped. The step goes on `workers_end_s` later."""
    output = folder / "run"
    where = f"  slurm: {{partition: {partition}}}\n  retries: 0\n"
    spec = write_job(folder, output, steps=STEPS, addresses=ADDRESSES, extra=where)
    reward = folder / "reward.py"
    reward.write_text(reward.read_text().replace("labels=None):\n", f"labels=None):\n{HELD}"))
    spec.write_text(spec.read_text().replace("environment: {", "environment: {step_timeout_s: 300, "))
    job = submit(slurm, spec)
    wait_until(lambda: steps_done(output) >= 3, lambda: log_of(output))
    (folder / "hold").touch()
    urgent = preempt(slurm, folder)
    wait_until(lambda: "CANCELLED AT" in log_of(output, characters=20000), lambda: log_of(output))
    time.sleep(workers_end_s)
    (folder / "hold").unlink()
    took_the_hosts(slurm, urgent, job)
    assert 3 <= steps_done(output) < STEPS, "it must be preempted in the middle, or this test shows nothing"
    start_now(slurm, job)
    ended = slurm.ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log_of(output)
    assert not (folder / "run.jobs" / "0001" / "failures").exists()
    assert outcome(output) == outcome(never_stopped(folder, STEPS))
