"""Plans a pipeline: finds the stage classes by name, and checks the types of the chain before anything starts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.artifacts.stage import Stage
from nemo_rl_like.artifacts.types import Artifact
from nemo_rl_like.pipeline.wiring import Wire, wire
from nemo_rl_like.spec.experiment import ExperimentSpec, StageSpec

STAGE_CLASSES: Mapping[str, str] = {
    "pretrain": "nemo_rl_like.stages.pretrain:PretrainStage",
    "sft": "nemo_rl_like.stages.sft:SftStage",
    "rl": "nemo_rl_like.stages.rl:RlStage",
    "preference": "nemo_rl_like.stages.preference:PreferenceStage",
    "reward_model": "nemo_rl_like.stages.reward_model:RewardModelStage",
    "distill": "nemo_rl_like.stages.distill:DistillStage",
    "teacher_logits": "nemo_rl_like.stages.teacher_logits:TeacherLogitsStage",
    "sample": "nemo_rl_like.stages.sample:SampleStage",
    "evaluate": "nemo_rl_like.stages.evaluate:EvaluateStage",
    "export": "nemo_rl_like.stages.export:ExportStage",
}
"""Stage classes by kind; a class is imported when a pipeline has a stage of its kind."""


class StageClass(Protocol):
    """How a stage is built."""

    def __call__(self, stage_spec: StageSpec, experiment_spec: ExperimentSpec) -> Stage: ...


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage, built and wired, not started."""

    wire: Wire
    stage: Stage

    @property
    def name(self) -> str:
        """Name of the stage and of its folder."""
        return self.wire.name


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline whose types fit."""

    spec: ExperimentSpec
    stages: tuple[PlannedStage, ...]

    def preflight(self) -> None:
        """Ask every stage what would stop it.

        Raises:
            InputError: lists every stage's problems.
        """
        found = [f"stages.{s.name}: {problem}" for s in self.stages for problem in s.stage.preflight()]
        problems = _without_repeats(found)
        if problems:
            raise InputError("\n  ".join([f"{len(problems)} problem(s) found before anything was started", *problems]))


def make_plan(spec: ExperimentSpec, classes: Mapping[str, str] = STAGE_CLASSES) -> Plan:
    """The plan of `spec`: stages built and wired, nothing started.

    Args:
        spec: the experiment.
        classes: stage classes by kind, as `package.module:Class`.

    Raises:
        SpecError: a reference between stages is wrong, or a stage takes another type than its source makes.
    """
    planned = tuple(
        PlannedStage(w, load_stage_class(classes[w.stage.kind])(w.stage, spec.for_stage(w.stage))) for w in wire(spec)
    )
    outputs: dict[str, type[Artifact]] = {}
    problems: list[str] = []
    for step in planned:
        problems.extend(_type_problems(step, outputs))
        outputs[step.name] = step.stage.output_type
    if problems:
        raise SpecError("\n  ".join([f"{len(problems)} problem(s) in the pipeline", *problems]))
    return Plan(spec, planned)


def load_stage_class(path: str) -> StageClass:
    """The class at `package.module:Class`. Raises ImportError or AttributeError when it is not there."""
    module, _, name = path.partition(":")
    return cast(StageClass, getattr(importlib.import_module(module), name))


def _type_problems(step: PlannedStage, outputs: Mapping[str, type[Artifact]]) -> list[str]:
    accepted = step.stage.input_types
    words = " or ".join(t.__name__ for t in accepted) or "nothing"
    return [
        f"stages.{step.name}: takes {words}, but stage {source!r} makes {outputs[source].__name__}; name another stage"
        for source in step.wire.sources
        if not issubclass(outputs[source], accepted)
    ]


def _without_repeats(problems: list[str]) -> list[str]:
    """Problems of the shared blocks are found by every stage; each text is said once, by the first stage that found it."""
    first: dict[str, str] = {}
    for problem in problems:
        first.setdefault(problem.partition(": ")[2], problem)
    return list(first.values())
