"""`nrl model fetch`, `nrl model check` and `nrl model merge`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from nemo_rl_like.cli.logs import log_to_stderr
from nemo_rl_like.export.merge import write_merged
from nemo_rl_like.model.check import check_folder
from nemo_rl_like.model.fetch import fetch_model


def fetch(name: str, to: Path | None) -> None:
    """Fetch a model and print where it lies."""
    log_to_stderr()
    typer.echo(str(fetch_model(name, to or Path("models") / name)))


def check(folder: Path, tp: int, pp: int, ep: int, adapter: Path | None, *, as_json: bool) -> bool:
    """Check a folder and print the figures; true when it passed."""
    report = check_folder(folder, tp, pp, ep, adapter=adapter)
    figures = asdict(report)
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
    else:
        for name, value in figures.items():
            typer.echo(f"{name:<24}{value}")
    return report.ok


def merge(base: Path, adapter: Path, target: Path, shard_gib: float) -> None:
    """Write the base with the adapters merged, and print where it lies."""
    log_to_stderr()
    write_merged(base, adapter, target, shard_gib)
    typer.echo(str(target))
