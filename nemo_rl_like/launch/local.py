"""The local target: `nrl node` on this host, detached from the terminal, with its log, process id and exit code in the submission's folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_like.artifacts.errors import StoppedBySignal, SubmitError
from nemo_rl_like.cluster.environment import allowed
from nemo_rl_like.cluster.watchdog import start_time
from nemo_rl_like.launch.lines import lines
from nemo_rl_like.launch.node.devices import DevicesMissing, count_devices
from nemo_rl_like.launch.target import Job, JobStatus, Rendered
from nemo_rl_like.spec.launch import LaunchSpec

LOG = "log.txt"
EXIT_CODE = "exit_code"
CANCELLED = "cancelled"
"""File that says that a person ended the job."""
_SCHEDULERS = ("cpus_per_node", "memory_gib_per_node", "time_limit_min")


class LocalTarget:
    """This host. Its ids are `process.start`: a process id and its start time, which together name one process."""

    name = "local"

    def problems(self, job: Job) -> list[str]:
        """Several hosts, a container, and what only a scheduler grants."""
        launch = job.spec.launch
        found = []
        if launch.nodes > 1:
            found.append(
                f"`launch.nodes` is {launch.nodes}, and the local target has this host alone; set it to 1, or start each host with `nrl node`"
            )
        if launch.image is not None:
            found.append(
                f"`launch.image` is {launch.image!r}, and the local target starts no container; use `--to container`, or leave it out"
            )
        if launch.mounts:
            found.append(
                "`launch.mounts` is given, and the local target starts no container; use `--to container`, or leave it out"
            )
        if launch.retries not in (0, LaunchSpec.model_fields["retries"].default):
            found.append(
                f"`launch.retries` is {launch.retries}, and the local target starts a job once; leave it out (`nrl resubmit` goes on)"
            )
        for field in _SCHEDULERS:
            if getattr(launch, field) != LaunchSpec.model_fields[field].default:
                found.append(
                    f"`launch.{field}` is {getattr(launch, field)}, and the local target limits nothing; leave it out"
                )
        return found

    def render(self, job: Job) -> Rendered:
        """No file beside the spec."""
        until = ("--until", job.until) if job.until is not None else ()
        node = (sys.executable, "-m", "nemo_rl_like", "node", str(job.folder / "spec.yaml"))
        return Rendered({}, (*node, "--exit-code-file", str(job.folder / EXIT_CODE), *until))

    def dry_run(self, job: Job, rendered: Rendered) -> None:
        """Count this host's devices. Raises SubmitError where there are fewer than the job takes."""
        launch = job.spec.launch
        try:
            count_devices(launch, launch.groups[0], "this host")
        except DevicesMissing as error:
            raise SubmitError(str(error)) from error

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Start it in a session of its own. Raises SubmitError, also where this host lacks devices."""
        self.dry_run(job, rendered)
        secrets = {ref.env: os.environ[ref.env] for ref in job.spec.secrets.values() if ref.env in os.environ}
        environ = allowed(os.environ) | secrets
        environ.pop("RAY_ADDRESS", None)
        try:
            with (job.folder / LOG).open("ab") as log:
                process = subprocess.Popen(
                    rendered.command,
                    cwd=job.working_folder,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise SubmitError(f"`nrl node` cannot be started: {error}") from error
        return f"{process.pid}.{start_time(process.pid)}"

    def status(self, job_id: str, folder: Path) -> JobStatus:
        """Running while the process lives; then by the exit code that it left."""
        if _lives(job_id):
            return JobStatus("running", f"process {job_id.partition('.')[0]}")
        try:
            code = int((folder / EXIT_CODE).read_text(encoding="ascii"))
        except FileNotFoundError:
            return JobStatus("failed", "the process was killed without a word")
        if code == 0:
            return JobStatus("done", "exit code 0", 0)
        if (folder / CANCELLED).exists():
            return JobStatus("cancelled", f"exit code {code}", code)
        saved = " after it saved; `nrl resubmit` goes on" if code == StoppedBySignal.exit_code else ""
        return JobStatus("failed", f"exit code {code}{saved}", code)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Lines of the log."""
        return lines(lambda: [folder / LOG], follow=follow, ended=lambda: not _lives(job_id))

    def cancel(self, job_id: str, folder: Path) -> None:
        """Ask it to save and end."""
        (folder / CANCELLED).touch()
        if _lives(job_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job_id.partition(".")[0]), signal.SIGTERM)


def _lives(job_id: str) -> bool:
    pid, _, started = job_id.partition(".")
    if start_time(int(pid)) != started:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
