"""Runs a planned pipeline in its output folder: skips what is done, resumes what is half done, runs the rest.

Each stage goes through: forget its record, clear its folder, record it as running with its key, run, record its artifact.
Whatever the moment of a kill, the next start finds either a record of that key (resume) or none (clear and start over).
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from nemo_rl_like.artifacts.errors import OutputFolderError, StoppedBySignal
from nemo_rl_like.artifacts.redaction import redacted, watch
from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import ARTIFACT_TYPES, Artifact
from nemo_rl_like.pipeline.decision import Action, decide
from nemo_rl_like.pipeline.keys import MODEL_FIELDS, Ingredients, ingredients, model_ingredients
from nemo_rl_like.pipeline.lineage import lineage_of
from nemo_rl_like.pipeline.planner import STAGE_CLASSES, Plan, PlannedStage, make_plan
from nemo_rl_like.pipeline.records import (
    OutputRecord,
    StageRecord,
    State,
    code_record,
    now,
    read_status,
    record_start,
    write_status,
)
from nemo_rl_like.pipeline.run_folder import RunFolder, Start, check_output
from nemo_rl_like.pipeline.wiring import check_until
from nemo_rl_like.spec.experiment import ExperimentSpec, stage_name
from nemo_rl_like.spec.loader import resolved_yaml, spec_hash

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """What became of one stage."""

    name: str
    action: Action
    reason: str
    """Why it was skipped, resumed or run."""
    artifact: Artifact
    seconds: float
    """Wall time in this start, in seconds."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What became of a run."""

    folder: Path
    stages: tuple[StageOutcome, ...]


def run_pipeline(
    spec: ExperimentSpec,
    *,
    start: Start = "new",
    plain: bool = False,
    until: str | None = None,
    classes: Mapping[str, str] = STAGE_CLASSES,
) -> RunResult:
    """Run the experiment in `spec.output`.

    Args:
        spec: the experiment.
        start: `new` needs an empty or new folder, `resume` continues a run or starts one, `overwrite` clears a run first.
        plain: no progress bars or colours.
        until: name of the last stage to run; the stages after it are checked, and left for a later start. None: all.
        classes: stage classes by kind.

    Raises:
        SpecError, InputError, OutputFolderError: before anything is started or changed.
        StoppedBySignal: a stage saved its state because it was asked to stop.
    """
    watch({name: os.environ[ref.env] for name, ref in spec.secrets.items() if ref.env in os.environ})
    if spec.cluster.auth is not None:
        os.environ["RAY_AUTH_MODE"] = spec.cluster.auth  # read when the first stage imports ray
    output = Path(spec.output)
    check_output(output, start)
    if start == "resume":
        check_same_model(output, spec)
    plan = make_plan(spec, classes)
    check_until(spec, until)
    plan.preflight()
    with RunFolder.open(output, start) as folder:
        record_start(folder.path, spec.name, start, spec_hash(spec), resolved_yaml(spec))
        return _Runner(plan, folder.path, plain).run(until)


class _Runner:
    """One pass over the stages of a plan."""

    def __init__(self, plan: Plan, folder: Path, plain: bool) -> None:
        self.plan = plan
        self.folder = folder
        self.plain = plain
        self.outcomes: dict[str, StageOutcome] = {}
        self.keys: dict[str, str] = {}

    def run(self, until: str | None) -> RunResult:
        """The stages in order, to `until`."""
        gone = sorted(set(read_status(self.folder).stages) - {s.name for s in self.plan.stages})
        if gone:
            logger.warning(
                "stages of an earlier start are not in the spec any more: %s; their folders are kept", ", ".join(gone)
            )
        for planned in self.plan.stages:
            self.outcomes[planned.name] = self.one(planned)
            if planned.name == until:
                break
        return RunResult(self.folder, tuple(self.outcomes.values()))

    def one(self, planned: PlannedStage) -> StageOutcome:
        """One stage: decide, and do it."""
        inputs = {name: self.outcomes[name].artifact for name in planned.wire.sources}
        known = {name: (self.keys[name], artifact.content_hash) for name, artifact in inputs.items()}
        made_from = ingredients(planned.wire.stage, self.plan.spec.for_stage(planned.wire.stage), known)
        self.keys[planned.name] = made_from.key
        record = read_status(self.folder).stages.get(planned.name)
        decision = decide(self.folder, record, made_from)
        logger.info("stage %s: %s (%s)", planned.name, decision.action, decision.reason)
        if decision.action == "skip" and record is not None and record.output is not None:
            return StageOutcome(planned.name, "skip", decision.reason, self.artifact(record.output), 0.0)
        if decision.action == "run":
            self.clear(planned.name)
        started = time.monotonic()
        artifact = self.execute(planned, made_from, inputs, resume=decision.action == "resume")
        return StageOutcome(planned.name, decision.action, decision.reason, artifact, time.monotonic() - started)

    def clear(self, name: str) -> None:
        """Forget a stage, then empty its folder: in this order, so that a kill in between leaves no record of a wrong folder."""
        status = read_status(self.folder)
        if name in status.stages:
            rest = {k: v for k, v in status.stages.items() if k != name}
            write_status(self.folder, status.model_copy(update={"stages": rest}))
        if (self.folder / name).exists():
            shutil.rmtree(self.folder / name)

    def execute(
        self, planned: PlannedStage, made_from: Ingredients, inputs: Mapping[str, Artifact], *, resume: bool
    ) -> Artifact:
        """Run one stage under a record of it."""
        stage_folder = self.folder / planned.name
        stage_folder.mkdir(exist_ok=True)
        context = StageContext(
            stage_name=planned.name,
            folder=stage_folder,
            run_folder=self.folder,
            seed=self.plan.spec.seed,
            resume=resume,
            start=planned.wire.start,
            lineage=lineage_of(self.plan.spec, self.folder, planned.name),
            plain=self.plain,
        )
        with _Attempt(self.folder, planned.name, made_from) as attempt:
            artifact = planned.stage.run(context, inputs)
            attempt.finish(artifact, planned.stage.output_type)
        return artifact

    def artifact(self, output: OutputRecord) -> Artifact:
        """The artifact that a record describes."""
        return ARTIFACT_TYPES[output.kind](self.folder / output.path, output.content_hash)


def check_same_model(output: Path, spec: ExperimentSpec) -> None:
    """A run is continued with the model that it was started with: another one would clear its checkpoints.

    Raises:
        OutputFolderError: the folder holds a run of another model.
    """
    by_name = {stage_name(stage): spec.for_stage(stage) for stage in spec.stages}
    for name, record in read_status(output).stages.items():
        new = Ingredients(model_ingredients(by_name.get(name, spec)))
        old = {field: value for field, value in record.made_from.items() if field.startswith(MODEL_FIELDS)}
        changes = new.changes_from(old) if old else []
        if changes:
            raise OutputFolderError(
                f"output folder {output} holds stage {name!r} of another model ({'; '.join(changes[:3])}); continue it with its "
                "own model, replace it with --overwrite, or set `output` to another folder"
            )


class _Attempt:
    """The record of one attempt at a stage: `running` from here on, then how it ended."""

    def __init__(self, folder: Path, name: str, made_from: Ingredients) -> None:
        self.folder = folder
        self.name = name
        self.started = time.monotonic()
        earlier = read_status(folder).stages.get(name)
        self.record = StageRecord(
            state="running",
            key=made_from.key,
            made_from=dict(made_from.values),
            started=earlier.started if earlier is not None else now(),
            attempts=earlier.attempts + 1 if earlier is not None else 1,
            seconds=earlier.seconds if earlier is not None else 0.0,
            code=code_record(),
        )

    def __enter__(self) -> Self:
        self.write(self.record)
        return self

    def finish(self, artifact: Artifact, expected: type[Artifact]) -> None:
        """Record the artifact. Raises TypeError or ValueError when the stage broke its contract."""
        if not isinstance(artifact, expected):
            raise TypeError(f"stage {self.name!r} returned a {type(artifact).__name__}, must be a {expected.__name__}")
        relative = artifact.path.resolve().relative_to(self.folder.resolve())
        output = OutputRecord(kind=type(artifact).__name__, path=str(relative), content_hash=artifact.content_hash)
        self.end("done", output=output)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            stopped = isinstance(error, StoppedBySignal | KeyboardInterrupt)
            self.end("stopped" if stopped else "failed", error=redacted(f"{type(error).__name__}: {error}"))

    def end(self, state: State, *, output: OutputRecord | None = None, error: str | None = None) -> None:
        """Write how the attempt ended."""
        seconds = self.record.seconds + time.monotonic() - self.started
        update = {"state": state, "finished": now(), "seconds": seconds, "output": output, "error": error}
        self.write(self.record.model_copy(update=update))

    def write(self, record: StageRecord) -> None:
        status = read_status(self.folder)
        write_status(self.folder, status.model_copy(update={"stages": {**status.stages, self.name: record}}))
