"""`nrl validate` and `nrl schema`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.pipeline.wiring import wire
from nemo_rl_like.spec.loader import json_schema, load_spec, spec_hash
from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.source import Position


def validate(path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Check a spec and say what is wrong; true when nothing is."""
    try:
        spec = load_spec(path, overrides)
        wires = wire(spec)
    except SpecProblems as error:
        return _refused(path, error, error.problems, as_json=as_json)
    except SpecError as error:
        return _refused(path, error, [SpecProblem(Position(str(path)), "stages", str(error))], as_json=as_json)
    names = [w.name for w in wires]
    if as_json:
        found = {"ok": True, "name": spec.name, "spec_hash": spec_hash(spec), "stages": names, "problems": []}
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(f"{path}: ok: {spec.name}, stages {' -> '.join(names)}, spec hash {spec_hash(spec)[:12]}")
    return True


def schema() -> None:
    """Print the JSON Schema."""
    typer.echo(json.dumps(json_schema(), indent=1))


def _refused(path: Path, error: SpecError, problems: Sequence[SpecProblem], *, as_json: bool) -> bool:
    if not as_json:
        raise error
    typer.echo(json.dumps({"ok": False, "problems": [p.to_json() for p in problems]}, indent=1))
    return False
