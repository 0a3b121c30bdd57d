"""`nrl eval`, `nrl chat`, `nrl export` and `nrl export check`: what one does with a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.cli.logs import log_to_stderr
from nemo_rl_like.export.check import check_bundle
from nemo_rl_like.pipeline.lineage import find_lineage
from nemo_rl_like.spec.evaluate import EvaluationSpec
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.spec.options import block_of, key_and_value, node_of
from nemo_rl_like.spec.source import Node, Position
from nemo_rl_like.stages.api import chat_session, checkpoint_at, evaluate_checkpoint, export_checkpoint


def evaluation(split: str, tasks: int | None, samples: int, temperature: float, max_new_tokens: int) -> EvaluationSpec:
    """The evaluation that the options ask for. Raises SpecProblems naming the option that is wrong."""
    values = {
        "split": node_of(split, "--split"),
        "tasks": node_of(tasks, "--tasks"),
        "samples_per_task": node_of(samples, "--samples"),
        "temperature": node_of(temperature, "--temperature"),
        "max_new_tokens": node_of(max_new_tokens, "--max-new-tokens"),
    }
    return block_of(EvaluationSpec, values)


def evaluate(source: Path, how: EvaluationSpec, *, as_json: bool) -> None:
    """Evaluate and print the metrics."""
    log_to_stderr()
    metrics = evaluate_checkpoint(source, how)
    if as_json:
        typer.echo(json.dumps(metrics, indent=1))
        return
    for name, value in metrics.items():
        typer.echo(f"{name:<32}{value:.4f}")


def chat(source: Path, *, temperature: float, max_new_tokens: int) -> None:
    """Read lines and print the model's answers until an empty line or the end of input."""
    with chat_session(source, temperature=temperature, max_new_tokens=max_new_tokens) as session:
        while text := _ask():
            typer.echo(session.reply(text))


def export_stage(
    kinds: Sequence[str],
    options: Sequence[str],
    *,
    adapter: bool,
    parity: str,
    shard_gib: float,
    license_name: str | None,
) -> ExportStageSpec:
    """The stage that the options ask for. Raises SpecProblems naming the option that is wrong."""
    if options and len(kinds) != 1:
        raise SpecError(
            f"{options[0]}: KEY=VALUE are options of one target; give one --to, or write the targets in a spec"
        )
    given = dict(key_and_value(text, "max_model_len=4096") for text in options)
    targets = [Node({"kind": node_of(kind, f"--to {kind}"), **given}, Position(f"--to {kind}")) for kind in kinds]
    values = {
        "adapter": node_of(adapter, "--adapter"),
        "targets": Node(targets, Position("--to")),
        "parity": node_of(parity, "--parity"),
        "shard_gib": node_of(shard_gib, "--shard-gib"),
        "license": node_of(license_name, "--license"),
    }
    return block_of(ExportStageSpec, values)


def export(source: Path, target: Path, stage: ExportStageSpec) -> None:
    """Export and print where it lies."""
    log_to_stderr()
    checkpoint = checkpoint_at(source)
    try:
        lineage = find_lineage(checkpoint)
    except InputError:  # it stands alone
        lineage = {}
    for place in export_checkpoint(checkpoint, target, stage, lineage):
        typer.echo(str(place))


def check_export(folder: Path, *, as_json: bool) -> bool:
    """Print what a bundle is and what is wrong with it; False if something is."""
    report = check_bundle(folder)
    problems = [{"path": problem.path, "message": problem.message} for problem in report.problems]
    if as_json:
        found = {"ok": not problems, "kind": report.kind, "manifest": report.manifest is not None, "problems": problems}
        typer.echo(json.dumps(found, indent=1))
        return not problems
    unproved = "" if report.manifest is not None else " (no manifest.json: its layout alone was checked)"
    typer.echo(f"{folder}: {report.kind}{unproved}: {f'{len(problems)} problem(s)' if problems else 'ok'}")
    for problem in report.problems:
        typer.echo(f"  {problem}")
    return not problems


def _ask() -> str:
    """One line from the user; empty at the end of input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""
