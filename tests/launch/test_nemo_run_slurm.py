"""NeMo-Run's real SlurmExecutor on a real Slurm with accounts, from which it reads states: stages as dependent jobs, each the real `nrl node`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import wait_until, write_job
from tests.launch.slurm_accounts import ACCOUNT
from tests.launch.slurm_cluster import ADDRESSES, Cluster, running
from tests.launch.test_nemo_run import Environment
from tests.launch.test_slurm import never_stopped
from tests.stages.killing import outcome

pytestmark = [pytest.mark.service, pytest.mark.slow]

PROGRAM = """#!/bin/sh
if [ -e FOLDER/fails ] && [ "$4" = rl ]; then echo 3 >"$6"; exit 3; fi
exec PYTHON -m nemo_rl_like "$@"
"""
"""`nrl` in the jobs' PATH; it fails in the stage `rl` where a file asks it to."""


class Submitter:
    """NeMo-Run's environment, from which jobs are submitted that run in this one."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        made = Environment(folder)
        program = folder / "bin/nrl"
        program.write_text(PROGRAM.replace("FOLDER", str(folder)).replace("PYTHON", sys.executable), encoding="utf-8")
        self.python = made.python
        own = {name: made.variables[name] for name in ("PYTHONPATH", "HOME")}
        self.environ = slurm.environ | own | {"PATH": f"{folder}/bin:{slurm.environ['PATH']}"}

    def nrl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), "-m", "nemo_rl_like", *words]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=500, cwd=self.folder)

    def submit(self, output: Path, nodes: int = 1) -> subprocess.CompletedProcess[str]:
        where = f"  time_limit_min: 20\n  retries: 0\n  slurm: {{account: {ACCOUNT}, partition: batch}}\n"
        addresses = ADDRESSES if nodes > 1 else {}
        spec = write_job(self.folder, output, nodes=nodes, ranks=nodes, steps=1, addresses=addresses, extra=where)
        spec.write_text(spec.read_text() + "  - {kind: evaluate}\n")
        return self.nrl("submit", str(spec), "--to", "slurm", "--via", "nemo-run", "--wait")

    def job_ids(self, count: int | None = None) -> list[int]:
        """Of all jobs so far, in the order of their submission; with `count`, once accounting has so many."""
        ask = ("sacct", "--noheader", "-X", "-P", "-a", "-S", "now-1days", "-o", "JobID")
        found = lambda: sorted(map(int, self.slurm.call(*ask).split()))
        if count is not None:
            wait_until(lambda: len(found()) == count, lambda: str(found()), seconds=60)
        return found()

    def state(self, job: int) -> str:
        """Name and state of a job by accounting, for example `0-rl COMPLETED`."""
        row = self.slurm.call("sacct", "--noheader", "-X", "-P", "-j", str(job), "-o", "JobName,State").strip()
        return row.rpartition(".")[2].split(" ")[0].replace("|", " ")


@pytest.fixture(scope="module")
def submitter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitter]:
    folder = tmp_path_factory.mktemp("nemo-run")
    (folder / "slurm").mkdir()
    with running(folder / "slurm", accounts=True) as slurm:
        yield Submitter(slurm, folder)


def test_two_hosts_are_one_job_a_stage_and_equal_a_run_on_one(submitter: Submitter) -> None:
    """GRPO with a data-parallel rank on each host: the same weights, moments, episodes and metrics to the last bit."""
    output = submitter.folder / "two"
    done = submitter.submit(output, nodes=2)
    folder = output.with_name("two.jobs")
    logs = {path.name: path.read_text() for path in (folder / "0001").glob("nemo-run-*.log")}
    assert done.returncode == 0, done.stdout + done.stderr + str(logs)
    assert set(logs) == {f"nemo-run-{stage}.{rank}.log" for stage in (0, 1) for rank in (0, 1)}
    assert {"node1", "node2"} == {path.name.split("-")[0] for path in (folder / "nodes").iterdir()}
    token = (folder / "0001" / "token").read_text()
    assert not any(token in text for text in logs.values())
    told = submitter.nrl("status", str(output)).stdout
    assert ": done (0-rl succeeded, 1-evaluate succeeded)" in told and "evaluate: done" in told, told
    assert outcome(output) == outcome(never_stopped(submitter.folder, 1))


def test_stages_are_dependent_jobs_and_after_one_that_failed_the_next_never_runs(submitter: Submitter) -> None:
    slurm, folder = submitter.slurm, submitter.folder
    output, before = folder / "first", len(submitter.job_ids())
    done = submitter.submit(output)
    assert done.returncode == 0, done.stdout + done.stderr
    first = submitter.job_ids(before + 2)
    assert [submitter.state(job) for job in first[-2:]] == ["0-rl COMPLETED", "1-evaluate COMPLETED"]
    told = submitter.nrl("status", str(output)).stdout
    assert ": done (0-rl succeeded, 1-evaluate succeeded)" in told and "evaluate: done" in told, told
    logged = submitter.nrl("logs", str(output)).stdout
    assert logged.index("stage rl: run") < logged.index("stage evaluate: run")

    (folder / "fails").touch()
    failed = submitter.submit(folder / "second")
    assert failed.returncode == 3 and "failed (0-rl failed" in failed.stdout, failed.stdout + failed.stderr
    rl = submitter.job_ids(before + 3)[-1]
    evaluate = rl + 1  # accounting lists it once it may start
    wait_until(lambda: submitter.state(rl) == "0-rl FAILED", lambda: submitter.state(rl), seconds=30)
    assert submitter.nrl("cancel", str(folder / "second")).returncode == 0
    wait_until(lambda: slurm.call("squeue", "--noheader") == "", lambda: slurm.call("squeue"))
    wait_until(
        lambda: submitter.state(evaluate) == "1-evaluate CANCELLED", lambda: submitter.state(evaluate), seconds=30
    )
    assert not list((folder / "second.jobs").rglob("nemo-run-1.0.*")), "the second stage never ran"
