"""`nrl pipeline`: what a run would do, does and did, and where its results come from. Loads no model and starts nothing but `run`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from nemo_rl_like.artifacts.errors import InputError, OutputFolderError
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.artifacts.lineage import lineage_text
from nemo_rl_like.pipeline.foresight import Foreseen, foresee
from nemo_rl_like.pipeline.lineage import find_lineage
from nemo_rl_like.pipeline.records import SPEC, StageRecord, read_run, read_status
from nemo_rl_like.pipeline.run_folder import holder_of
from nemo_rl_like.pipeline.wiring import wire
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.spec.nearest import nearest


def plan(path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Print the graph and what would become of each stage; false if one lacks a file."""
    spec = load_spec(path, overrides)
    found = foresee(spec)
    if as_json:
        rows: list[JSON] = [_foreseen_json(one) for one in found]
        typer.echo(json.dumps({"name": spec.name, "output": spec.output, "stages": rows}, indent=1))
    else:
        typer.echo(f"{spec.name} -> {spec.output}")
        cells = [(f.wire.name, f.wire.stage.kind, ", ".join(f.wire.sources) or "-", f.action, f.reason) for f in found]
        _table(("stage", "kind", "from", "action", "why"), cells)
    return all(one.action != "blocked" for one in found)


def why(path: Path, stage: str, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print why a stage would be run, resumed or skipped: each thing that differs, and the stages that follow it."""
    spec = load_spec(path, overrides)
    found = {one.wire.name: one for one in foresee(spec)}
    if stage not in found:
        near = nearest(stage, found)
        raise InputError(
            f"there is no stage {stage!r} in {path}, it has {', '.join(found)}"
            + (f"; did you mean `{near}`?" if near else "")
        )
    one = found[stage]
    below = _below(stage, list(found.values()))
    if as_json:
        typer.echo(json.dumps({**_foreseen_json(one), "below": list(below)}, indent=1))
        return
    typer.echo(f"{stage}: {one.action}: {one.reason}")
    for change in one.changes:
        typer.echo(f"  {change}")
    if one.action in ("run", "resume") and below:
        typer.echo(f"then again, since they build on it: {', '.join(below)}")


@dataclass(frozen=True, slots=True)
class _Shown:
    """One stage of a run, as `status` tells it."""

    name: str
    kind: str
    state: str
    record: StageRecord | None


def status(folder: Path, *, as_json: bool) -> None:
    """Print how far each stage of a run is, and who works on it."""
    run = read_run(folder) if folder.is_dir() else None
    if run is None or not (folder / SPEC).is_file():
        raise OutputFolderError(
            f"{folder} holds no started run (no {SPEC} and run.json); give the output folder of a run"
        )
    spec, records, holder = load_spec(folder / SPEC), read_status(folder).stages, holder_of(folder)
    stages = [_shown(one.name, one.stage.kind, records.get(one.name), alive=holder is not None) for one in wire(spec)]
    if as_json:
        rows: list[JSON] = [_status_json(one) for one in stages]
        found = {
            "name": run.name,
            "folder": str(folder),
            "in_use_by": holder,
            "starts": len(run.starts),
            "stages": rows,
        }
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(f"{run.name} in {folder}: " + (f"in use by {holder}" if holder else "nobody works on it now"))
    cells = [(s.name, s.kind, s.state, *_figures(s.record)) for s in stages]
    _table(("stage", "kind", "state", "starts", "seconds", "made"), cells)


def lineage(path: Path) -> None:
    """Print where a bundle, a stage's result or a run's last result comes from, as JSON."""
    typer.echo(lineage_text(find_lineage(path)), nl=False)


def _shown(name: str, kind: str, record: StageRecord | None, *, alive: bool) -> _Shown:
    if record is None:
        return _Shown(name, kind, "waiting", None)
    state = "killed" if record.state == "running" and not alive else record.state
    return _Shown(name, kind, state, record)


def _figures(record: StageRecord | None) -> tuple[str, str, str]:
    if record is None:
        return "0", "-", "-"
    made = record.output.path if record.output is not None else (record.error or "-")
    return str(record.attempts), f"{record.seconds:.1f}", made


def _status_json(one: _Shown) -> JSON:
    record = None if one.record is None else one.record.model_dump(exclude={"made_from"})
    return {"name": one.name, "kind": one.kind, "state": one.state, "record": record}


def _foreseen_json(one: Foreseen) -> dict[str, JSON]:
    return {
        "name": one.wire.name,
        "kind": one.wire.stage.kind,
        "from": list(one.wire.sources),
        "starts_from": one.wire.start,
        "action": one.action,
        "reason": one.reason,
        "changes": list(one.changes),
        "key": one.key,
    }


def _below(name: str, found: Sequence[Foreseen]) -> tuple[str, ...]:
    """Stages that build on `name`, near and far, in order."""
    reached = {name}
    for one in found:
        if reached & set(one.wire.sources):
            reached.add(one.wire.name)
    return tuple(one.wire.name for one in found if one.wire.name in reached and one.wire.name != name)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
    for row in (head, *rows):
        typer.echo("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip())
