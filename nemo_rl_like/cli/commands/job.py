"""`nrl node`, `nrl submit`, `nrl status`, `nrl logs`, `nrl cancel` and `nrl resubmit`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from nemo_rl_like.artifacts.errors import NrlError, SpecError
from nemo_rl_like.cli.logs import log_to_stderr
from nemo_rl_like.launch import registry, submission
from nemo_rl_like.launch.node.node import run_node
from nemo_rl_like.launch.submission import Submission
from nemo_rl_like.launch.submit import Request, dry_run, resubmit, status, submit, wait
from nemo_rl_like.launch.target import Job, JobStatus, Rendered
from nemo_rl_like.pipeline.records import read_status
from nemo_rl_like.spec.loader import load_spec

VIA = "nemo-run"
"""What jobs may be handed to, instead of to the target itself."""


def node(
    path: Path,
    overrides: Sequence[str],
    *,
    join: str | None,
    until: str | None,
    exit_code_file: Path | None,
    stop_file: Path | None,
) -> int:
    """One host's part of a job; returns its exit code, which it also leaves in a file where one is named."""
    log_to_stderr()
    code = 1
    try:
        code = run_node(path, overrides, join=join, until=until, stop_file=stop_file)
    except NrlError as error:
        code = error.exit_code
        raise
    finally:
        if exit_code_file is not None:
            exit_code_file.write_text(f"{code}\n", encoding="ascii")
    return code


def request_of(
    path: Path,
    overrides: Sequence[str],
    to: str,
    *,
    via: str | None,
    seeds: str | None,
    stages_as_jobs: bool,
    until: str | None,
) -> Request:
    """What a command line asks for. Raises SpecError, SubmitError."""
    if via not in (None, VIA):
        raise SpecError(f"--via is {via!r}, must be {VIA}; without it the target of --to is used itself")
    target = to if via is None else f"{via}-{to}"
    if via is not None and target not in registry.TARGETS:
        raise SpecError(f"--via {via} reaches local and slurm, and --to is {to!r}; leave --via out")
    registry.entry(target)
    try:
        numbers = tuple(_seed(word) for word in seeds.split(",")) if seeds is not None else ()
    except ValueError as error:
        raise SpecError(
            f"--seeds is {seeds!r}, must be whole numbers of 0 or more with commas between them, such as 1,2,3"
        ) from error
    return Request(load_spec(path, overrides), target, Path.cwd(), numbers, stages_as_jobs, until)


def _seed(word: str) -> int:
    if not re.fullmatch("[0-9]+", word):
        raise ValueError(word)
    return int(word)


def show(request: Request) -> None:
    """Print the files of a request and the command that would start it, and let the target check them."""
    dry_run(request, _print)


def _print(job: Job, rendered: Rendered) -> None:
    for name, text in rendered.files.items():
        typer.echo(f"--- {job.folder / name}\n{text}", nl=not text.endswith("\n"))
    typer.echo(f"--- command\n{' '.join(rendered.command)}")


def start(request: Request, *, waits: bool) -> int:
    """Submit; with `waits` until all jobs have ended. Returns 0, or the exit code of the first job that failed."""
    return _told(submit(request), waits=waits)


def again(run: Path, *, waits: bool) -> int:
    """Submit once more what was submitted last."""
    return _told(resubmit(run), waits=waits)


def _told(made: Sequence[Submission], *, waits: bool) -> int:
    for one in made:
        typer.echo(f"{one.folder}: {one.record.target} job {one.record.job_id}")
    typer.echo(f"next: nrl status {made[-1].folder}; nrl logs {made[-1].folder} -f")
    codes = [_code(one, wait(one)) for one in made] if waits else []
    return next((code for code in codes if code), 0)


def _code(one: Submission, found: JobStatus) -> int:
    typer.echo(f"{one.folder}: {found.state} ({found.detail})")
    return 0 if found.state == "done" else found.exit_code or 1


def tell(run: Path, *, as_json: bool) -> None:
    """Print how far a job and the stages of its run are."""
    one, found = status(run)
    runs = {
        output.name: {name: record.state for name, record in read_status(output).stages.items()}
        for output in submission.outputs(one)
    }
    array = bool(one.record.seeds)
    if as_json:
        values = {
            "folder": str(one.folder),
            "target": one.record.target,
            "job": one.record.job_id,
            "state": found.state,
        }
        stages = runs if array else next(iter(runs.values()))
        typer.echo(
            json.dumps({**values, "detail": found.detail, "exit_code": found.exit_code, "stages": stages}, indent=1)
        )
        return
    typer.echo(f"{one.folder}: {one.record.target} job {one.record.job_id}: {found.state} ({found.detail})")
    for run_name, stages in runs.items():
        for name, state in stages.items():
            typer.echo(f"  {f'{run_name}: ' if array else ''}{name}: {state}")


def logs(run: Path, *, follow: bool) -> None:
    """Print a job's log; with `follow` until it ends."""
    one = submission.find(run)
    target = registry.target(one.record.target)
    if follow and (found := target.status(one.record.job_id, one.folder)).state == "queued":
        typer.echo(f"{one.folder}: queued ({found.detail}); its log follows", err=True)
    for line in target.logs(one.record.job_id, one.folder, follow=follow):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def cancel(run: Path) -> None:
    """End a job."""
    one = submission.find(run)
    registry.target(one.record.target).cancel(one.record.job_id, one.folder)
    typer.echo(
        f"{one.folder}: {one.record.target} job {one.record.job_id} is told to end; `nrl resubmit` goes on from its last checkpoint"
    )
