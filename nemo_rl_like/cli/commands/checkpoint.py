"""`nrl eval`, `nrl chat` and `nrl export`: what one does with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from pydantic import ValidationError

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cli.logs import log_to_stderr
from nemo_rl_like.spec.evaluate import EvaluationSpec
from nemo_rl_like.stages.api import chat_session, evaluate_checkpoint, export_checkpoint


def evaluation(split: str, tasks: int | None, samples: int, temperature: float, max_new_tokens: int) -> EvaluationSpec:
    """The evaluation that the options ask for. Raises InputError for a split that does not exist."""
    values = {
        "split": split,
        "tasks": tasks,
        "samples_per_task": samples,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
    }
    try:
        return EvaluationSpec.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"--{first['loc'][0]} is {first['input']!r}: {first['msg']}") from error


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


def export(source: Path, target: Path, *, shard_gib: float, adapter: bool) -> None:
    """Export and print where it lies."""
    log_to_stderr()
    typer.echo(str(export_checkpoint(source, target, shard_gib=shard_gib, adapter=adapter)))


def _ask() -> str:
    """One line from the user; empty at the end of input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""
