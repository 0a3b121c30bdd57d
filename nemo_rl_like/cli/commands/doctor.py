"""`nrl doctor`."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from nemo_rl_like.launch.doctor.examine import examine
from nemo_rl_like.launch.doctor.finding import worst
from nemo_rl_like.spec.loader import load_spec


def doctor(path: Path | None, overrides: Sequence[str], shared: Path | None, *, as_json: bool) -> bool:
    """Print what was found on this host; false if something would stop a job."""
    spec = None if path is None else load_spec(path, overrides)
    folder = shared or (Path.cwd() if spec is None else Path(spec.output))
    findings = examine(spec, folder)
    level = worst(findings)
    if as_json:
        found = {"host": socket.gethostname(), "level": level, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(found, indent=1))
        return level != "fail"
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        typer.echo(f"{finding.level:<4}  {finding.check:<{width}}  {finding.what}")
        if finding.fix:
            typer.echo(f"{'':4}  {'':{width}}  fix: {finding.fix}")
    return level != "fail"
