"""Which stages each stage builds on, read from the spec alone: nothing is loaded, so a login node can check it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.spec.distill import DistillStageSpec, TeacherLogitsStageSpec
from nemo_rl_like.spec.evaluate import EvaluateStageSpec
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, StageSpec, stage_name
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.spec.sft import SftStageSpec

RESERVED = ("run.json", "status.json", "spec.yaml", "report.json", "logs")
INIT_FROM, CHECKPOINTS = "init_from", "checkpoints"
"""Fields whose stages must have the model of the stage itself: their checkpoints are loaded into it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Wire:
    """One stage and the names of the stages whose artifacts it takes, in pipeline order."""

    name: str
    stage: StageSpec
    sources: tuple[str, ...]
    start: str | None = None
    """The one of them that it starts from; None: it starts from the spec's model, or from nothing."""


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
        taken = _taken(stage, spec, before)
        problems.extend(
            _reference_problem(name, one, source, spec.stages, before)
            for one in taken
            for source in one.sources
            if source not in _names(before, one.made_by)
        )
        problems.extend(_model_problems(stage, spec, before, taken))
        sources = tuple(dict.fromkeys(source for one in taken for source in one.sources))
        start = next((one.sources[0] for one in taken if one.field == INIT_FROM and one.sources), None)
        if isinstance(stage, ExportStageSpec) and not sources:
            problems.append(
                f"stages.{name}: no stage before it makes a checkpoint to export; put `sft`, `preference`, `distill` or `rl` before it"
            )
        if isinstance(stage, SftStageSpec) and stage.data.is_made and not _dataset(stage, before).sources:
            problems.append(
                f"stages.{name}.data: no source; give `path` or `environment_demonstrations: true`, or put a `sample` stage before it"
            )
        wires.append(Wire(name, stage, sources, start))
    if problems:
        raise SpecError("\n  ".join([f"{len(problems)} problem(s) in the pipeline", *problems]))
    return tuple(wires)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Artifacts of one type that a stage takes."""

    sources: tuple[str, ...]
    """Names of the stages that make them."""
    field: str
    """Where the spec may name them."""
    made_by: tuple[type, ...]
    """Kinds of stages that make them."""
    what: str
    """The artifact, in words."""


def _taken(stage: StageSpec, spec: ExperimentSpec, before: Sequence[StageSpec]) -> tuple[_Taken, ...]:
    """What `stage` takes from earlier stages."""
    alike = _names([s for s in before if spec.starts_alike(s, stage)], TRAINING_STAGES)
    if isinstance(stage, TeacherLogitsStageSpec):
        return (*_conversations(stage), *_teachers(stage))
    if isinstance(stage, EvaluateStageSpec):
        return (_Taken(stage.checkpoints or alike, CHECKPOINTS, TRAINING_STAGES, "a checkpoint"),)
    if isinstance(stage, ExportStageSpec):
        made_by = (*TRAINING_STAGES, RewardModelStageSpec)
        makers = _names(before, TRAINING_STAGES)
        return (_Taken(_given_or_last(stage.checkpoint, makers), "checkpoint", made_by, "a checkpoint"),)
    taken = [_Taken(_given_or_last(stage.init_from, alike), INIT_FROM, TRAINING_STAGES, "a checkpoint")]
    if isinstance(stage, SftStageSpec) and stage.data.is_made:
        taken.append(_dataset(stage, before))
    if isinstance(stage, DistillStageSpec):
        taken.extend((*_conversations(stage), *_teachers(stage)))
        if stage.data.stored_logits_stage is not None:
            stored = (stage.data.stored_logits_stage,)
            taken.append(_Taken(stored, "data.stored_logits_stage", (TeacherLogitsStageSpec,), "teachers' log-probs"))
    if isinstance(stage, RlStageSpec):
        taken.extend(_beside(stage))
    return tuple(taken)


def _conversations(stage: DistillStageSpec | TeacherLogitsStageSpec) -> tuple[_Taken, ...]:
    """The data that an earlier stage makes."""
    named = stage.data.from_stage
    return () if named is None else (_Taken((named,), "data.from_stage", (SampleStageSpec,), "a dataset"),)


def _teachers(stage: DistillStageSpec | TeacherLogitsStageSpec) -> tuple[_Taken, ...]:
    """The checkpoints that teach."""
    named = tuple(teacher.stage for teacher in stage.teachers if teacher.stage is not None)
    return (_Taken(named, "teachers", TRAINING_STAGES, "a checkpoint"),) if named else ()


def _beside(stage: RlStageSpec) -> list[_Taken]:
    """The models beside the policy."""
    found = []
    if stage.teacher_stage is not None:
        found.append(_Taken((stage.teacher_stage,), "teacher_stage", TRAINING_STAGES, "a checkpoint"))
    if stage.reward_model is not None and stage.reward_model.stages:
        judges = stage.reward_model.stages
        found.append(_Taken(judges, "reward_model.stages", (RewardModelStageSpec,), "a reward model"))
    return found


def _dataset(stage: SftStageSpec, before: Sequence[StageSpec]) -> _Taken:
    """The data that an earlier stage makes."""
    sources = _given_or_last(stage.data.from_stage, _names(before, (SampleStageSpec,)))
    return _Taken(sources, "data.from_stage", (SampleStageSpec,), "a dataset")


def _model_problems(
    stage: StageSpec, spec: ExperimentSpec, before: Sequence[StageSpec], taken: Sequence[_Taken]
) -> list[str]:
    """Why the checkpoints that the stage loads into its own model do not fit it."""
    by_name = {stage_name(s): s for s in before}
    return [
        f"stages.{stage_name(stage)}.{one.field}: stage {source!r} has another model than this one (`settings.model`); name a stage "
        "with the same, or give this one the same `settings`"
        for one in taken
        if one.field in (INIT_FROM, CHECKPOINTS)
        for source in one.sources
        if source in by_name and not spec.starts_alike(by_name[source], stage)
    ]


def _given_or_last(given: str | None, makers: Sequence[str]) -> tuple[str, ...]:
    return (given,) if given is not None else tuple(makers[-1:])


def _names(stages: Sequence[StageSpec], kinds: tuple[type, ...]) -> tuple[str, ...]:
    return tuple(stage_name(s) for s in stages if isinstance(s, kinds))


def _reference_problem(
    name: str, taken: _Taken, source: str, stages: Sequence[StageSpec], before: Sequence[StageSpec]
) -> str:
    """Why `source` cannot be taken from, and what can."""
    makers = _names(before, taken.made_by)
    if source in [stage_name(s) for s in before]:
        why = f"stage {source!r} makes no {taken.what.removeprefix('a ')}"
    elif source in [stage_name(s) for s in stages]:
        why = f"stage {source!r} does not come before stage {name!r}"
    else:
        near = nearest(source, makers)
        why = f"there is no stage {source!r}" + (f"; did you mean `{near}`?" if near else "")
    choices = f"give one of {', '.join(makers)}" if makers else f"no stage before it makes {taken.what}; leave it out"
    return f"stages.{name}.{taken.field}: {why}; {choices}"


def _name_problems(name: str) -> list[str]:
    if _NAME.fullmatch(name) and name not in RESERVED:
        return []
    reserved = ", ".join(RESERVED)
    return [
        f"stages.{name}.name: {name!r} cannot name a folder; use up to 100 letters, digits, `_`, `-` or `.`, and none of {reserved}"
    ]


def check_until(spec: ExperimentSpec, until: str | None) -> None:
    """Raises SpecError if `--until` names no stage of the experiment."""
    names = [stage_name(stage) for stage in spec.stages]
    if until is not None and until not in names:
        near = nearest(until, names)
        meant = f"; did you mean `{near}`?" if near else "; name one of them"
        raise SpecError(f"--until is {until!r}, and the stages are {', '.join(names)}{meant}")
