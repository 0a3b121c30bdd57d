"""`nrl env list`."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from nemo_rl_like.environment.registry import available


def list_environments(*, as_json: bool) -> None:
    """Print name, origin and class of every registered environment."""
    entries = available()
    if as_json:
        typer.echo(json.dumps([asdict(e) for e in entries], indent=1))
        return
    width = max((len(e.name) for e in entries), default=0)
    for entry in entries:
        typer.echo(f"{entry.name:<{width}}  {entry.origin:<10}  {entry.target}")
