"""`nrl run`, `nrl resume` and `nrl demo`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

import nemo_rl_like
from nemo_rl_like.artifacts.errors import InputError, NrlError
from nemo_rl_like.cli.banner import banner, next_commands
from nemo_rl_like.cli.logs import log_to_stderr
from nemo_rl_like.cluster import joined
from nemo_rl_like.observe.terminal import Terminal
from nemo_rl_like.pipeline.records import STATUS
from nemo_rl_like.pipeline.resume import load_resumable
from nemo_rl_like.pipeline.run_folder import Start
from nemo_rl_like.pipeline.runner import RunResult, run_pipeline
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.stages.summary import summarize_run

DEMO_SPEC = Path("configs/demo.yaml")


def run(path: Path, overrides: Sequence[str], *, start: Start, plain: bool, until: str | None = None) -> None:
    """Run a spec file, to the stage `until`."""
    _run(load_spec(path, overrides), start, plain=plain, until=until)


def resume(folder: Path, overrides: Sequence[str], *, plain: bool) -> None:
    """Continue the run in `folder`, with relative paths meant as at its start."""
    found = load_resumable(folder, overrides)
    if found.working_folder.is_dir():
        os.chdir(found.working_folder)
    _run(found.spec, "resume", plain=plain)


def demo(seed: int, output: Path, *, plain: bool) -> None:
    """Run the demo in its own folder, replacing an earlier one."""
    _run(load_spec(demo_spec(), [f"seed={seed}", f"output={output}"]), "overwrite", plain=plain)


def demo_spec() -> Path:
    """The demo's spec: in the source tree, or where an installation put it.

    Raises:
        InputError: it is in neither.
    """
    places = [Path(nemo_rl_like.__file__).parents[1] / DEMO_SPEC, Path(sys.prefix) / "share/nemo-rl-like" / DEMO_SPEC]
    for place in places:
        if place.is_file():
            return place
    raise InputError(f"the demo's spec is in neither of {', '.join(map(str, places))}; run it from a source checkout")


def _run(spec: ExperimentSpec, start: Start, *, plain: bool, until: str | None = None) -> None:
    log_to_stderr()
    terminal = Terminal()
    terminal.banner(banner(spec))
    try:
        result = run_pipeline(spec, start=start, plain=plain, until=until)
    except KeyboardInterrupt:
        typer.echo(_next(spec), err=True, nl=False)
        raise
    except Exception as error:
        if not (isinstance(error, NrlError) and error.exit_code == InputError.exit_code) and _next(spec):
            error.add_note(_next(spec).rstrip())
        raise
    _report(terminal, spec, result)


def _next(spec: ExperimentSpec) -> str:
    """A line that says how a run that began goes on; empty in a job, whose `nrl node` or scheduler starts it again."""
    if joined.ENV in os.environ or not (Path(spec.output) / STATUS).is_file():
        return ""
    return f"next: nrl resume {shlex.quote(spec.output)}    # goes on from what was saved\n"


def _report(terminal: Terminal, spec: ExperimentSpec, result: RunResult) -> None:
    """What each stage did, before/after samples, the figures, and what to type next."""
    summary = summarize_run(spec, result.folder, {o.name: round(o.seconds, 2) for o in result.stages})
    for outcome in result.stages:
        terminal.note(f"{outcome.name}: {outcome.action} ({outcome.reason}), {outcome.seconds:.1f} s")
    if summary.samples:
        terminal.before_after(summary.samples, summary.before, summary.after)
    for name, accuracy in summary.accuracies().items():
        terminal.note(f"held-out greedy accuracy after {name}: {accuracy:.1%}")
    if summary.plot is not None:
        terminal.note(f"reward plot: {summary.plot}")
    terminal.next_commands(next_commands(result.folder))
