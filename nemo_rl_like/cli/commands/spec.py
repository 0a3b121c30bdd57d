"""`nrl validate`, `nrl schema` and `nrl algorithms`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import typer

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.pipeline.wiring import wire
from nemo_rl_like.spec.loader import json_schema, load_spec, spec_hash
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.presets import Preset, presets
from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.source import Position, plain


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


def algorithms(name: str | None, *, as_json: bool) -> None:
    """Print every preset with family and paper, or one with its lines. Raises SpecError for a name that is none."""
    known = presets()
    if name is not None and name not in known:
        near = nearest(name, known)
        raise SpecError(
            f"there is no algorithm {name!r}" + (f"; did you mean `{near}`?" if near else "; see `nrl algorithms`")
        )
    chosen = [known[name]] if name is not None else sorted(known.values(), key=lambda p: (p.stage, p.family, p.name))
    if as_json:
        typer.echo(json.dumps([_as_json(preset) for preset in chosen], indent=1))
    elif name is not None:
        (preset,) = chosen
        where = "in the `algorithm` block of an `rl` stage" if preset.stage == "rl" else f"in a `{preset.stage}` stage"
        typer.echo(
            f"# {preset.summary}\n# {preset.paper}\n# preset: {preset.name} {where} stands for:\n{preset.lines.rstrip()}"
        )
    else:
        width = max(len(preset.name) for preset in chosen)
        for preset in chosen:
            typer.echo(
                f"{preset.name:<{width}}  {preset.stage:<12}  {preset.family:<12}  {preset.summary}; {preset.paper}"
            )


def _as_json(preset: Preset) -> dict[str, JSON]:
    choices = cast(JSON, plain(preset.block))
    return {
        "name": preset.name,
        "stage": preset.stage,
        "family": preset.family,
        "paper": preset.paper,
        "summary": preset.summary,
        "choices": choices,
    }


def _refused(path: Path, error: SpecError, problems: Sequence[SpecProblem], *, as_json: bool) -> bool:
    if not as_json:
        raise error
    typer.echo(json.dumps({"ok": False, "problems": [p.to_json() for p in problems]}, indent=1))
    return False
