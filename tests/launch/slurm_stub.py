"""Jobs of a real Slurm with a stub in the place of `nrl node`, and how a requeued job is started without Slurm's two minutes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.launch.jobs import nrl, wait_until, write_job
from tests.launch.slurm_cluster import Cluster

_REVOKED_S = 2.0
"""A host takes no start of a job that is stamped with the second of its requeueing or before ("Job credential revoked")."""
NAP_S = 2
STUB = """#!/bin/sh
echo "$SLURM_PROCID.${SLURM_RESTART_COUNT:-0}: $*"
case $(cat FOLDER/behaviour) in
  tell) echo "$GIVEN_IMAGE | $GIVEN_MOUNTS | $GIVEN_WORKDIR | $GIVEN_NO_HOME | $PWD | $SECRET_WORD$MY_WORD";;
  save) while [ ! -e "$4" ]; do sleep 0.1; done; exit 75;;
  heed) trap 'exit 75' TERM; while true; do sleep 0.1; done;;
  late) trap 'sleep 5; exit 75' TERM; while true; do sleep 0.1; done;;
  deaf) trap '' TERM; while true; do sleep 0.1; done;;
  nap) sleep NAP_S; exit 3;;
  *) exit $(cat FOLDER/behaviour);;
esac
"""


class Stub:
    """Jobs whose container has a stub in the place of `nrl`: it tells what it was given, and does as it is told."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.output = folder / "run"
        self.jobs = folder / "run.jobs"
        (folder / "bin").mkdir()
        (folder / "bin" / "nrl").write_text(STUB.replace("FOLDER", str(folder)).replace("NAP_S", str(NAP_S)))
        (folder / "bin" / "nrl").chmod(0o755)
        self.environ = slurm.environ | {"PATH": f"{folder}/bin:{slurm.environ['PATH']}"}

    def does(self, behaviour: str) -> None:
        (self.folder / "behaviour").write_text(behaviour)

    def spec(self, extra: str = "", *, nodes: int = 1, engine: str = "embedded") -> Path:
        lines = f"  image: some/image@sha256:aa\n{extra}"
        return write_job(self.folder, self.output, nodes=nodes, addresses={}, extra=lines, engine=engine)

    def submit(self, spec: Path, *further: str) -> subprocess.CompletedProcess[str]:
        return nrl("submit", str(spec), "--to", "slurm", *further, environ=self.environ, cwd=self.folder)

    def started(self, spec: Path, *further: str) -> str:
        done = self.submit(spec, *further)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("slurm job ")[1].split()[0]

    def heard(self, name: str = "log.txt") -> list[str]:
        """What the stub and Slurm wrote, without Slurm's own remarks."""
        path = self.jobs / "0001" / name
        return (
            [
                line
                for line in path.read_text().splitlines()
                if not line.startswith(("srun:", "slurmstepd", "Terminated"))
            ]
            if path.exists()
            else []
        )

    def restart(self, job: str, behaviour: str) -> None:
        """Wait until the job is requeued, and start it again, with another behaviour."""
        wait_until(lambda: set(self.slurm.states(job)) == {"PENDING"}, lambda: str(self.slurm.states(job)))
        self.does(behaviour)
        start_now(self.slurm, job)


def start_now(slurm: Cluster, job: str) -> None:
    """Start a requeued job without the two minutes that Slurm gives its hosts to clean up, once they have."""
    wait_until(lambda: set(slurm.states(job)) == {"PENDING"}, lambda: str(slurm.states(job)))
    wait_until(
        lambda: slurm.call("sinfo", "-h", "-p", "batch", "-t", "idle", "-o", "%D").strip() == "4",
        lambda: slurm.call("sinfo"),
    )
    time.sleep(_REVOKED_S)
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
