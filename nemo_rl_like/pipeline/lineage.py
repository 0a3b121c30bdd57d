"""Where an artifact comes from: every stage behind it with what it was made from, its code and its metrics, as one JSON object.

An export carries it as `lineage.json`, so a served bundle leads back to data hashes, spec, commit and metrics without the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.artifacts.lineage import LINEAGE
from nemo_rl_like.pipeline.records import SPEC, StageRecord, read_run, read_status
from nemo_rl_like.pipeline.wiring import Wire, wire
from nemo_rl_like.spec.evaluate import EvaluateStageSpec
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec, spec_hash

FORMAT = 1
_METRICS = "metrics.jsonl"
_REPORT = Path("report") / "report.json"
_TAIL_BYTES = 1 << 16


def lineage_of(spec: ExperimentSpec, folder: Path, name: str) -> dict[str, JSON]:
    """The lineage of what stage `name` makes, or made, in the run at `folder`.

    `stages`: each stage behind it, and itself once done, by name: kind, key, what it was made from, its inputs, output hash, code and last metrics.
    `evaluations`: the reports, made so far, that look at one of them. Times are left out, so that equal runs have equal lineages.

    Raises:
        OutputFolderError: the run's records are damaged.
        SpecError: the spec has no such stage.
    """
    wires = {one.name: one for one in wire(spec)}
    done = {n: r for n, r in read_status(folder).stages.items() if r.state == "done"}
    behind = _behind(wires, name)
    shown = [one for one in wires.values() if one.name in behind or one.name == name]
    reports = {
        one.name: _read_report(folder / one.name / _REPORT)
        for one in wires.values()
        if isinstance(one.stage, EvaluateStageSpec) and one.name in done and set(one.sources) & {*behind, name}
    }
    return {
        "format": FORMAT,
        "experiment": spec.name,
        "stage": name,
        "seed": spec.seed,
        "spec_hash": spec_hash(spec),
        "stages": {one.name: _node(one, done[one.name], folder) for one in shown if one.name in done},
        "evaluations": dict(reports),
    }


def find_lineage(path: Path) -> dict[str, JSON]:
    """The lineage of a bundle, of a stage's folder, or of the last stage of a run.

    Raises:
        InputError: the path belongs to no run and holds no `lineage.json`, or that cannot be read.
    """
    inside = path / LINEAGE
    if inside.is_file():
        return _read(inside)
    for folder in (path, *path.resolve().parents):
        if read_run(folder) is not None and (folder / SPEC).is_file():
            spec = load_spec(folder / SPEC)
            names = [one.name for one in wire(spec)]
            below = path.resolve().relative_to(folder.resolve()).parts
            name = below[0] if below else names[-1]
            if name not in names:
                raise InputError(
                    f"{path} belongs to none of the run's stages ({', '.join(names)}); give a stage's folder"
                )
            return lineage_of(spec, folder, name)
    raise InputError(
        f"{path} holds no {LINEAGE}, and neither it nor a folder above it is a run's output; give a bundle, a run, or a folder inside one"
    )


def _behind(wires: Mapping[str, Wire], name: str) -> set[str]:
    """Names of all stages that `name` builds on, near and far."""
    found: set[str] = set()
    waiting = list(wires[name].sources)
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting.extend(wires[source].sources)
    return found


def _node(one: Wire, record: StageRecord, folder: Path) -> JSON:
    made_from: dict[str, JSON] = {name: json.loads(value) for name, value in sorted(record.made_from.items())}
    return {
        "kind": one.stage.kind,
        "key": record.key,
        "inputs": list(one.sources),
        "output": None if record.output is None else record.output.model_dump(),
        "code": None if record.code is None else record.code.model_dump(),
        "made_from": made_from,
        "metrics": _last_metrics(folder / one.name / _METRICS),
    }


def _last_metrics(path: Path) -> JSON:
    """The last line of a metrics file, without times; None where there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    if not lines:
        return None
    line = json.loads(lines[-1])
    return {k: v for k, v in line.items() if not k.startswith("timing/")}


def _read_report(path: Path) -> JSON:
    """Metrics by checkpoint of an evaluation; None where its file is gone."""
    if not path.is_file():
        return None
    results = json.loads(path.read_bytes(), parse_constant=lambda _: None)["results"]
    return {name: result["metrics"] for name, result in results.items()}


def _read(path: Path) -> dict[str, JSON]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a lineage: {error}; export the checkpoint again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f"{path} is not a lineage of format {FORMAT}; export the checkpoint again with this version")
    return found
