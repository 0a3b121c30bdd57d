"""What a cluster's accounting (slurmdbd) keeps of a job, by `sacct`: how each of its tasks ended, and the GPU time of all its starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch.client import call

_COLUMNS = "JobID,State,ExitCode,ElapsedRaw,AllocTRES"
_CLOCKS = timedelta(days=1)
"""How far the cluster's clock may stand behind the submitter's."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """A job by accounting."""

    ends: tuple[tuple[str, str], ...]
    """State and exit code of each task, array task or part, in its last start; none where accounting does not know the job."""
    gpu_hours: float | None
    """Of all starts; None where accounting counts no GPUs of the job (it has none, or `AccountingStorageTRES` lacks gres/gpu)."""

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[str]]) -> Accounts:
        """From rows of sacct, in the order of their starts: id, state, exit code, seconds, allocated resources."""
        ends = {row[0]: (row[1], row[2]) for row in rows}
        counted = [(int(row[3] or 0), gpus) for row in rows if (gpus := _gpus(row[4])) is not None]
        hours = sum(seconds * gpus for seconds, gpus in counted) / 3600
        return cls(tuple(ends.values()), hours if counted else None)


def accounts_of(job_id: str, submitted: float) -> Accounts | str:
    """What accounting has of a job, or why it cannot be asked.

    Args:
        submitted: time of the submission, in seconds since 1970: Slurm gives numbers of jobs again once it starts anew.
    """
    since = (datetime.fromtimestamp(submitted) - _CLOCKS).isoformat(timespec="seconds")
    which = (f"--jobs={job_id}", f"--starttime={since}", "--duplicates", "--allocations")
    try:
        done = call(("sacct", *which, "--noheader", "--parsable2", f"--format={_COLUMNS}"))
    except SubmitError as error:
        return str(error)
    if done.returncode != 0:
        return done.stderr.strip() or f"`sacct` ended with {done.returncode}"
    return Accounts.of_rows([line.split("|") for line in done.stdout.splitlines() if line])


def _gpus(resources: str) -> int | None:
    counts = dict(part.split("=", 1) for part in resources.split(",") if "=" in part)
    return int(counts["gres/gpu"]) if "gres/gpu" in counts else None
