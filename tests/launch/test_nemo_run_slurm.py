"""NeMo-Run's real SlurmExecutor on a real Slurm with accounts, from which it reads states: stages as dependent jobs, each the real `nrl node`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import wait_until, write_job
from tests.launch.slurm_accounts import ACCOUNT
from tests.launch.slurm_cluster import Cluster, running
from tests.launch.test_nemo_run import Environment

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
        self.environ = slurm.environ | {"PATH": f"{folder}/bin:{slurm.environ['PATH']}", "HOME": str(folder)}

    def nrl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), "-m", "nemo_rl_like", *words]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=500, cwd=self.folder)

    def submit(self, output: Path) -> subprocess.CompletedProcess[str]:
        where = f"  time_limit_min: 20\n  retries: 0\n  slurm: {{account: {ACCOUNT}, partition: batch}}\n"
        spec = write_job(self.folder, output, nodes=1, ranks=1, steps=1, addresses={}, extra=where)
        spec.write_text(spec.read_text() + "  - {kind: evaluate}\n")
        return self.nrl("submit", str(spec), "--to", "slurm", "--via", "nemo-run", "--wait")

    def state(self, job: int) -> str:
        """Name and state of a job by accounting, for example `0-rl COMPLETED`."""
        row = self.slurm.call("sacct", "--noheader", "-X", "-P", "-j", str(job), "-o", "JobName,State").strip()
        return row.rpartition(".")[2].split(" ")[0].replace("|", " ")


def test_stages_are_dependent_jobs_and_after_one_that_failed_the_next_never_runs(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    with running(tmp_path / "slurm", accounts=True) as slurm:
        submitter = Submitter(slurm, tmp_path)
        output = tmp_path / "first"
        done = submitter.submit(output)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [submitter.state(job) for job in (1, 2)] == ["0-rl COMPLETED", "1-evaluate COMPLETED"]
        told = submitter.nrl("status", str(output)).stdout
        assert ": done (0-rl succeeded, 1-evaluate succeeded)" in told and "evaluate: done" in told, told
        logged = submitter.nrl("logs", str(output)).stdout
        assert logged.index("stage rl: run") < logged.index("stage evaluate: run")

        (tmp_path / "fails").touch()
        failed = submitter.submit(tmp_path / "second")
        assert failed.returncode == 3 and "failed (0-rl failed" in failed.stdout, failed.stdout + failed.stderr
        wait_until(lambda: submitter.state(3) == "0-rl FAILED", lambda: submitter.state(3), seconds=30)
        assert submitter.nrl("cancel", str(tmp_path / "second")).returncode == 0
        wait_until(lambda: slurm.call("squeue", "--noheader") == "", lambda: slurm.call("squeue"))
        wait_until(lambda: submitter.state(4) == "1-evaluate CANCELLED", lambda: submitter.state(4), seconds=30)
        assert not list((tmp_path / "second.jobs").rglob("nemo-run-1.0.*")), "the second stage never ran"
