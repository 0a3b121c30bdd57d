"""The Slurm target: sbatch, scontrol, sacct and scancel, each under a deadline."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.cluster.environment import allowed
from nemo_rl_like.launch.client import call, output_of
from nemo_rl_like.launch.lines import lines
from nemo_rl_like.launch.local import CANCELLED
from nemo_rl_like.launch.slurm import refusals
from nemo_rl_like.launch.slurm.accounting import Accounts, accounts_of
from nemo_rl_like.launch.slurm.script import NAME, problems, script
from nemo_rl_like.launch.target import Job, JobStatus, Rendered, State

_STATES: Mapping[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), "queued"),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"),
        "running",
    ),
    "COMPLETED": "done",
    **dict.fromkeys(("CANCELLED", "REVOKED"), "cancelled"),
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"), "failed"
    ),
}
_OVER = ("already completing or completed", "Invalid job id")
"""What `scancel` says of a job that has ended."""
_PREEMPTED = "a job of higher priority took its hosts; `nrl resubmit` goes on from the last checkpoint"
_FIRST: tuple[State, ...] = ("running", "queued", "failed", "cancelled", "unknown", "done")
"""An array is in the first of these states that one of its tasks is in."""


class SlurmTarget:
    """A Slurm cluster, by its own commands; `SLURM_CONF` and the user's rights are theirs."""

    name = "slurm"

    def problems(self, job: Job) -> list[str]:
        """What Slurm cannot honour of the job, or what its script cannot hold."""
        return problems(job)

    def render(self, job: Job) -> Rendered:
        """The job script."""
        return Rendered({NAME: script(job)}, ("sbatch", "--parsable", str(job.folder / NAME)))

    def dry_run(self, job: Job, rendered: Rendered) -> None:
        """`sbatch --test-only`. Raises SubmitError with its words, and the fields that they are about."""
        _sbatch(("sbatch", "--test-only"), job, rendered.files[NAME])

    def submit(self, job: Job, rendered: Rendered) -> str:
        """The id of the job, with the allow-list of variables and the secrets that the spec names. Raises SubmitError."""
        return _sbatch(rendered.command, job).strip().partition(";")[0]

    def status(self, job_id: str, folder: Path) -> JobStatus:
        """What slurmctld knows; what accounting keeps once it has forgotten."""
        asked = call(("scontrol", "-o", "show", "job", job_id))
        tasks = [_fields(line) for line in asked.stdout.splitlines() if line.startswith("JobId=")]
        if not tasks and "Invalid job id" not in asked.stderr:
            raise SubmitError(f"`scontrol` refused (exit code {asked.returncode}): {asked.stderr.strip()}")
        accounts = accounts_of(job_id, (folder / NAME).stat().st_mtime)
        found = [_told(task, folder) for task in tasks]
        if not found and isinstance(accounts, Accounts):
            ended = all(mark.exists() for mark in _marks(job_id, folder))
            found = [_status(state, code, "", cancelled=ended) for state, code in accounts.ends]
        found = found or [_forgotten(accounts)]
        worst = min(found, key=lambda one: _FIRST.index(one.state))
        details = list(dict.fromkeys(one.detail for one in found))
        if isinstance(accounts, Accounts) and accounts.gpu_hours is not None:
            details.append(f"{accounts.gpu_hours:.2f} GPU hours")
        return JobStatus(worst.state, "; ".join(details), worst.exit_code)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Lines of the job's log, of every task's, or of the task that the id names. Raises SubmitError where there is none, with the job's state."""
        ended = lambda: self.status(job_id, folder).state not in ("queued", "running")  # noqa: E731
        files = lambda: sorted(folder.glob(f"log{_task(job_id) or '*'}.txt"))  # noqa: E731
        yield from lines(files, follow=follow, ended=ended)
        if not files():
            found = self.status(job_id, folder)
            raise SubmitError(f"{folder} has no log: slurm job {job_id} is {found.state} ({found.detail})")

    def cancel(self, job_id: str, folder: Path) -> None:
        """A job that runs is told to save and end, and is not started again; one that was told before, or waits, is ended by `scancel`."""
        marks = _marks(job_id, folder)
        told = all(mark.exists() for mark in marks)
        for mark in marks:
            mark.touch()
        running = self.status(job_id, folder).state == "running"
        ways: list[tuple[str, ...]] = [("--batch", "--signal=USR1")] if running and not told else [()]
        if running and not told and len(marks) > 1:  # an array: those that wait first, before another's end starts them
            ways = [("--state=PENDING",), ("--state=RUNNING", *ways[0])]
        for how in ways:
            done = call(("scancel", *how, job_id))
            if done.returncode != 0 and not any(words in done.stderr for words in _OVER):
                raise SubmitError(f"`scancel` refused (exit code {done.returncode}): {done.stderr.strip()}")


def _task(job_id: str) -> str:
    """`-N` for task N of an array, as its files have it; nothing for a whole job."""
    _, array, number = job_id.partition("_")
    return f"-{number}" if array else ""


def _mark(folder: Path, task: str) -> Path:
    """File that says that a person ended a task: `-N`, or nothing for a whole job."""
    return folder / f"{CANCELLED}{task}"


def _marks(job_id: str, folder: Path) -> list[Path]:
    """Those of all tasks that the id names."""
    tasks = [path.stem.removeprefix("seed") for path in sorted(folder.glob("seed-*.yaml"))]
    return [_mark(folder, task) for task in ([_task(job_id)] if "_" in job_id else tasks or [""])]


def _sbatch(command: Sequence[str], job: Job, text: str | None = None) -> str:
    try:
        return output_of(command, environ=_environ(job), text=text)
    except SubmitError as error:
        raise SubmitError(f"{error}{refusals.fix(str(error), job.spec.launch)}") from error


def _environ(job: Job) -> dict[str, str]:
    """What sbatch hands on to the job: never the rest of the submitter's environment."""
    secrets = {ref.env: os.environ[ref.env] for ref in job.spec.secrets.values() if ref.env in os.environ}
    own = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
    found = allowed(os.environ) | secrets | own
    found.pop("RAY_ADDRESS", None)
    return found


def _fields(line: str) -> dict[str, str]:
    """`Key=Value` words of one line of `scontrol -o`; values with blanks keep their first word."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _told(fields: Mapping[str, str], folder: Path) -> JobStatus:
    """One task, array task or group of hosts by slurmctld."""
    number = fields.get("ArrayTaskId", "")
    mark = _mark(folder, f"-{number}" if number else "")
    found = _status(fields["JobState"], fields.get("ExitCode", ""), fields.get("Reason", ""), cancelled=mark.exists())
    words = [f"seed {number}: {found.detail}" if number else found.detail]
    if found.state == "running" and fields.get("NodeList", "(null)") != "(null)":
        words.append(f"on {fields['NodeList']}")
    if found.state == "queued" and fields.get("StartTime", "Unknown") != "Unknown":
        words.append(f"expected to start at {fields['StartTime']}")
    if found.state in ("queued", "running") and fields.get("Restarts", "0") != "0":
        words.append(f"started again {fields['Restarts']} times")
    return replace(found, detail=", ".join(words))


def _status(state: str, exit_code: str, reason: str, *, cancelled: bool = False) -> JobStatus:
    """`cancelled`: a person ended it, and it saved."""
    name = state.split()[0].rstrip("+")
    code, _, number = exit_code.partition(":")
    known = _STATES.get(name, "unknown")
    over = known not in ("queued", "running")
    words = [
        name,
        *([reason] if reason not in ("", "None") else []),
        *([f"exit code {exit_code}"] if exit_code and over else []),
        *([_PREEMPTED] if name == "PREEMPTED" else []),
    ]
    value = (
        (int(code) or (128 + int(number or 0) if number not in ("", "0") else 0)) if over and code.isdigit() else None
    )
    return JobStatus("cancelled" if known == "failed" and cancelled else known, ", ".join(words), value)


def _forgotten(accounts: Accounts | str) -> JobStatus:
    """A job that slurmctld no longer knows, and accounting neither."""
    why = (
        "accounting does not know it either"
        if isinstance(accounts, Accounts)
        else f"there is no accounting: {accounts}"
    )
    told = "how it ended is not known; its log and the stages of its run are what is left"
    return JobStatus("unknown", f"slurmctld has forgotten the job (MinJobAge), and {why}; {told}")
