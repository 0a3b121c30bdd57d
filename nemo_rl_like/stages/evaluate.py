"""The `evaluate` stage: the checkpoints of earlier stages on held-out tasks, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

from nemo_rl_like.artifacts.files import atomic_write
from nemo_rl_like.artifacts.hashing import hash_json
from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, Report
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.rollout.evaluation import EvaluationReport
from nemo_rl_like.spec.evaluate import EvaluateStageSpec, EvaluationSpec
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.preflight import check_tasks, problems_of, require_sampler
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import StartModel, sampled_policy, start_model
from nemo_rl_like.stages.workers import ROLLOUT_SERVICE, host_rollout, worker_group
from nemo_rl_like.training.engine import RunEngine
from nemo_rl_like.training.step_services import ROLLOUT

REPORT = "report.json"
MODEL = "model"
"""Name of the evaluation of the spec's own model, when no checkpoint is evaluated."""


class EvaluateStage:
    """Greedy accuracy (and avg@k) of each checkpoint; its artifact is a folder with `report.json`."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint,)
    output_type: type[Artifact] = Report

    def __init__(self, stage_spec: EvaluateStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Problems of model, devices, engine, environment and prompts."""
        return problems_of(self.spec, self.stage, lambda: check_tasks(self.spec, self.stage.evaluation.split))

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Evaluate one checkpoint after another on the same engine."""
        model = start_model(self.spec, context.folder, next(iter(inputs.values()), None))
        found: dict[str, EvaluationReport] = {}
        with evaluator(self.spec, context.run_folder, model) as (workers, engine):
            for index, name in enumerate(list(inputs) or [MODEL]):
                if index:
                    engine.policy.load(inputs[name].path)
                    engine.sync(engine.version + 1)
                found[name] = evaluate(workers, engine, self.stage.evaluation)
        folder = context.folder / "report"
        folder.mkdir(exist_ok=True)
        atomic_write(folder / REPORT, report_json(self.stage.evaluation, found))
        return Report.of(folder)


@contextmanager
def evaluator(
    spec: ExperimentSpec, run_folder: Path, model: StartModel, service: str = ROLLOUT_SERVICE
) -> Iterator[tuple[WorkerGroup, RunEngine]]:
    """Policy, engine and rollout worker (of class `service`) for `model` as it is. Raises SpecError if the engine cannot sample from it."""
    require_sampler(spec)
    session = shared_session(spec.cluster, run_folder)
    with worker_group(session) as workers:
        host_rollout(workers, spec, model.folder, model.config, service)
        policy = sampled_policy(session, spec, model)
        try:
            engine = RunEngine.start(spec.engine, policy, model.folder, spec.model.dtype, model.config)
            engine.sync(0)
            try:
                yield workers, engine
            finally:
                engine.close()
        finally:
            policy.group.shutdown()


def evaluate(workers: WorkerGroup, engine: RunEngine, evaluation: EvaluationSpec) -> EvaluationReport:
    """One evaluation of what the engine holds."""
    got = workers.call(ROLLOUT, "evaluate", evaluation, engine.client(), what="evaluation")
    return cast(EvaluationReport, got)


def report_json(evaluation: EvaluationSpec, found: Mapping[str, EvaluationReport]) -> bytes:
    """`report.json`: figures and every task's answers by checkpoint; timings are left out, so that it is reproducible."""
    content = {
        "evaluation": evaluation.model_dump(),
        "evaluation_hash": hash_json(evaluation.model_dump()),
        "results": {
            name: {
                "metrics": {k: v for k, v in report.metrics().items() if not k.startswith("timing/")},
                "tasks": [asdict(result) for result in report.results],
            }
            for name, report in found.items()
        },
    }
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
