"""`nrl explain`: the resolved spec with each value's origin, and what the run needs and takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.pipeline.forecast import GIB, HARDWARE, Hardware, StageForecast, forecast
from nemo_rl_like.pipeline.placement import drawing
from nemo_rl_like.pipeline.warnings import warnings_of
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.origins import DEFAULT, as_yaml, values_with_origins


def explain(
    path: Path, overrides: Sequence[str], *, device: str, efficiency: float, every_value: bool, as_json: bool
) -> None:
    """Print all of it. Raises InputError for an unknown device or a model that cannot be read."""
    hardware = _hardware(device)
    spec, values = values_with_origins(path, overrides)
    stages = forecast(spec)
    seconds = sum(stage.seconds(hardware, efficiency) for stage in stages)
    warnings = warnings_of(spec, stages, hardware, seconds)
    assumed = _assumptions(spec, device, hardware, efficiency)
    if as_json:
        shown: list[JSON] = [{"path": ".".join(map(str, v.path)), "value": v.value, "origin": v.origin} for v in values]
        found: dict[str, JSON] = {
            "name": spec.name,
            "values": shown,
            "stages": [_as_json(stage, spec, hardware, efficiency) for stage in stages],
            "seconds": None if spec.launch.accelerator == "cpu" else round(seconds, 1),
            "assumptions": list(assumed),
            "downloads": list(downloads(spec)),
            "warnings": list(warnings),
        }
        typer.echo(json.dumps(found, indent=1))
        return
    kept = values if every_value else [v for v in values if v.origin != DEFAULT]
    typer.echo(as_yaml(kept), nl=False)
    if not every_value:
        typer.echo(f"# and {len(values) - len(kept)} defaults: --all shows them")
    for stage in stages:
        _print_stage(stage, spec, hardware, efficiency)
    typer.echo("\nassumptions:")
    for line in assumed:
        typer.echo(f"  {line}")
    for title, lines in (("downloads", downloads(spec)), ("warnings", warnings)):
        typer.echo(f"\n{title}: {'none' if not lines else ''}".rstrip())
        for line in lines:
            typer.echo(f"  {line}")


def downloads(spec: ExperimentSpec) -> list[str]:
    """What the job fetches from elsewhere: models, tokenizers and data are local paths, so only an image."""
    return [] if spec.launch.image is None else [f"{spec.launch.image}, by the container runtime of each host"]


def _hardware(device: str) -> Hardware:
    if device not in HARDWARE:
        near = nearest(device, HARDWARE)
        raise InputError(
            f"--device is {device!r}"
            + (f"; did you mean `{near}`?" if near else "")
            + f"; use one of {', '.join(HARDWARE)}"
        )
    return HARDWARE[device]


def _assumptions(spec: ExperimentSpec, device: str, hardware: Hardware, efficiency: float) -> list[str]:
    lines = ["every row fills the context, and every response its limit: figures are upper bounds"]
    if spec.launch.accelerator == "cpu":
        return [*lines, "no time is estimated for CPU cores, whose speed differs too much"]
    return [
        *lines,
        f"devices are {device}: {hardware.flops / 1e12:g} TFLOP/s dense 16-bit, {hardware.bandwidth / 1e12:g} TB/s, {hardware.memory / GIB:.0f} GiB",
        f"{efficiency:.0%} of that is reached (--efficiency); 6 operations a parameter and trained token, 2 a scored or sampled one, attention left out",
        "decoding reads all weights once for each token of a row; environments, weight syncs and starts take no time",
    ]


def _print_stage(stage: StageForecast, spec: ExperimentSpec, hardware: Hardware, efficiency: float) -> None:
    typer.echo(f"\n{stage.name} ({stage.kind})")
    if not stage.roles:
        typer.echo("  not estimated, see the warnings" if stage.problem else "  needs no device")
        return
    active = (
        ""
        if stage.active_parameters == stage.parameters
        else f", {_count(stage.active_parameters)} of them for a token"
    )
    typer.echo(f"  model: {_count(stage.parameters)} parameters{active}")
    for line in drawing(stage.roles, spec.launch):
        typer.echo(f"  {line}")
    work = stage.work
    if work is not None:
        tokens = {"trained": work.trained_tokens, "scored": work.scored_tokens, "sampled": work.sampled_tokens}
        parts = ", ".join(f"{_count(count)} {name}" for name, count in tokens.items() if count)
        typer.echo(f"  tokens a step, at most: {parts}; {work.steps} steps")
    if stage.memory is None:
        typer.echo(f"  memory: {stage.why_no_memory}")
    else:
        parts_of = {**stage.memory.parts, **stage.beside}
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts_of.items())
        typer.echo(f"  memory of a rank: {_gib(stage.memory_of_rank or 0)} = {listed}")
    if work is not None and spec.launch.accelerator == "gpu":
        typer.echo(f"  time: {_time(stage.seconds(hardware, efficiency))}")


def _as_json(stage: StageForecast, spec: ExperimentSpec, hardware: Hardware, efficiency: float) -> JSON:
    memory: Mapping[str, JSON] | None = None
    if stage.memory is not None:
        memory = {**stage.memory.parts, **stage.beside, "total": stage.memory_of_rank, "rank": stage.memory.rank}
    work = stage.work
    return {
        "name": stage.name,
        "kind": stage.kind,
        "parameters": stage.parameters,
        "active_parameters": stage.active_parameters,
        "devices": stage.devices,
        "placement": drawing(stage.roles, spec.launch),
        "steps": None if work is None else work.steps,
        "tokens_per_step": None
        if work is None
        else {"trained": work.trained_tokens, "scored": work.scored_tokens, "sampled": work.sampled_tokens},
        "memory_bytes": memory,
        "memory_not_estimated": stage.why_no_memory or None,
        "seconds": None if spec.launch.accelerator == "cpu" else round(stage.seconds(hardware, efficiency), 1),
    }


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / 2**20:.2f} MiB"


def _time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
