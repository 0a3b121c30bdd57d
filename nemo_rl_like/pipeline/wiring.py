"""Which stages each stage builds on, read from the spec alone: nothing is loaded, so a login node can check it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.spec.experiment import (
    TRAINING_STAGES,
    EvaluateStageSpec,
    ExperimentSpec,
    ExportStageSpec,
    SftStageSpec,
    StageSpec,
    stage_name,
)
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.sample import SampleStageSpec

RESERVED = ("run.json", "status.json", "spec.yaml", "report.json", "logs")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Wire:
    """One stage and the names of the stages whose artifacts it takes, in pipeline order."""

    name: str
    stage: StageSpec
    sources: tuple[str, ...]


def wire(spec: ExperimentSpec) -> tuple[Wire, ...]:
    """Every stage with its sources, in order.

    Raises:
        SpecError: lists every reference to a stage that is not there, comes later or makes something else, every export
            without a checkpoint to export, every `sft` without data, and every name that cannot be a folder's.
    """
    wires: list[Wire] = []
    problems: list[str] = []
    for index, stage in enumerate(spec.stages):
        name = stage_name(stage)
        before = spec.stages[:index]
        problems.extend(_name_problems(name))
        sources, field = _sources(stage, before)
        problems.extend(
            _reference_problem(name, field, source, spec.stages, before) for source in _bad(sources, before)
        )
        if isinstance(stage, ExportStageSpec) and not sources:
            problems.append(
                f"stages.{name}: no stage before it makes a checkpoint to export; put `sft`, `preference` or `rl` before it"
            )
        data, missing = _data_sources(name, stage, spec.stages, before)
        problems.extend(missing)
        wires.append(Wire(name, stage, (*sources, *data)))
    if problems:
        raise SpecError("\n  ".join([f"{len(problems)} problem(s) in the pipeline", *problems]))
    return tuple(wires)


def _sources(stage: StageSpec, before: Sequence[StageSpec]) -> tuple[tuple[str, ...], str]:
    """Names of the stages that `stage` takes artifacts from, and the field that may name them."""
    makers = _makers(before)
    if isinstance(stage, EvaluateStageSpec):
        return stage.checkpoints or makers, "checkpoints"
    given, field = (
        (stage.checkpoint, "checkpoint") if isinstance(stage, ExportStageSpec) else (stage.init_from, "init_from")
    )
    return ((given,) if given is not None else makers[-1:]), field


def _data_sources(
    name: str, stage: StageSpec, stages: Sequence[StageSpec], before: Sequence[StageSpec]
) -> tuple[tuple[str, ...], list[str]]:
    """The name of the stage that makes the data of `stage`, if one does, and what is wrong with it."""
    if not isinstance(stage, SftStageSpec) or not stage.data.is_made:
        return (), []
    makers = tuple(stage_name(s) for s in before if isinstance(s, SampleStageSpec))
    source = stage.data.from_stage or (makers[-1] if makers else None)
    if source is None:
        return (), [
            f"stages.{name}.data: no source; give `path` or `environment_demonstrations: true`, or put a `sample` stage before it"
        ]
    if source in makers:
        return (source,), []
    return (source,), [_problem(name, "data.from_stage", source, "dataset", makers, stages, before)]


def _makers(stages: Sequence[StageSpec]) -> tuple[str, ...]:
    return tuple(stage_name(s) for s in stages if isinstance(s, TRAINING_STAGES))


def _bad(sources: Sequence[str], before: Sequence[StageSpec]) -> list[str]:
    makers = _makers(before)
    return [s for s in sources if s not in makers]


def _reference_problem(
    name: str, field: str, source: str, stages: Sequence[StageSpec], before: Sequence[StageSpec]
) -> str:
    """Why no checkpoint can be taken from `source`, and from where."""
    return _problem(name, field, source, "checkpoint", _makers(before), stages, before)


def _problem(
    name: str,
    field: str,
    source: str,
    what: str,
    makers: Sequence[str],
    stages: Sequence[StageSpec],
    before: Sequence[StageSpec],
) -> str:
    """Why `source` cannot be taken from, and what can; `makers` make a `what`."""
    if source in [stage_name(s) for s in before]:
        why = f"stage {source!r} makes no {what}"
    elif source in [stage_name(s) for s in stages]:
        why = f"stage {source!r} does not come before stage {name!r}"
    else:
        near = nearest(source, makers)
        why = f"there is no stage {source!r}" + (f"; did you mean `{near}`?" if near else "")
    choices = f"give one of {', '.join(makers)}" if makers else f"no stage before it makes a {what}; leave it out"
    return f"stages.{name}.{field}: {why}; {choices}"


def _name_problems(name: str) -> list[str]:
    if _NAME.fullmatch(name) and name not in RESERVED:
        return []
    reserved = ", ".join(RESERVED)
    return [
        f"stages.{name}.name: {name!r} cannot name a folder; use up to 100 letters, digits, `_`, `-` or `.`, and none of {reserved}"
    ]
