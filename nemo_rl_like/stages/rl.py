"""The `rl` stage: reinforcement learning of the model or of an earlier checkpoint from an environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.experiment import ExperimentSpec, RlStageSpec
from nemo_rl_like.stages.preflight import (
    check_checkpoints,
    check_first_weights,
    check_tasks,
    check_teacher,
    problems_of,
    prompts_are_known_early,
)
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import StartModel, start_model
from nemo_rl_like.stages.training import train
from nemo_rl_like.stages.workers import host_rollout, worker_group
from nemo_rl_like.training.engine import RunEngine
from nemo_rl_like.training.reinforcement import ROLLOUT, RlRecipe

ROLLOUTS = "rollouts.jsonl"
Models: TypeAlias = tuple[Policy, Policy | None, Policy | None, RunEngine]
"""Policy, reference, teacher, engine."""


class RlStage:
    """Trains on rewards; its artifact is the final checkpoint."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint,)
    output_type: type[Artifact] = Checkpoint

    def __init__(self, stage_spec: RlStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Problems of model, devices, engine, environment and prompts."""
        splits = ["train"]
        if self.stage.evaluate_every_steps and self.stage.evaluation is not None:
            splits.append(self.stage.evaluation.split)
        checks = [partial(check_tasks, self.spec, split) for split in splits]
        if self.stage.teacher is not None:
            checks.append(partial(check_teacher, self.spec, self.stage.teacher))
        return problems_of(self.spec, partial(check_first_weights, self.spec, self.stage), *checks)

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Train, resuming from the newest valid checkpoint in the stage's folder."""
        spec, stage = self.spec, self.stage
        model = start_model(spec, context.folder, inputs)
        check_checkpoints(context.folder, model.identity)
        session = shared_session(spec.cluster, context.run_folder)
        with worker_group(session) as workers:
            host_rollout(workers, spec, model.folder, model.config)
            if not prompts_are_known_early(spec):
                workers.call(ROLLOUT, "check_prompts", "train", what="check of the prompts' lengths")
            with self._models(context, model) as (policy, reference, teacher, engine):
                rollouts = context.folder / ROLLOUTS if spec.logging.rollouts else None
                recipe = RlRecipe(stage, spec.seed, policy, reference, teacher, engine, workers, rollouts)
                policy.start_training(stage.optimizer, recipe.total_updates)
                return Checkpoint.of(train(spec, context, recipe, policy, model.identity, stage.checkpoint))

    @contextmanager
    def _models(self, context: StageContext, model: StartModel) -> Iterator[Models]:
        """The policy, its frozen start as reference if a KL needs one, the teacher if there is one, and the engine."""
        spec = self.spec
        session = shared_session(spec.cluster, context.run_folder)
        policy = Policy.start(session, spec.policy, model.folder, spec.model.dtype, model.initialize)
        try:
            reference = teacher = None
            if self.stage.algorithm.kl.coef:
                reference = Policy(policy.group, "reference")
                reference.host(model.folder, spec.policy, spec.model.dtype, model.initialize)
            if self.stage.teacher is not None:
                teacher = Policy(policy.group, "teacher")
                teacher.host(Path(self.stage.teacher), spec.policy, spec.model.dtype)
            engine = RunEngine.start(spec.engine, policy, model.folder, spec.model.dtype, model.config)
            try:
                yield policy, reference, teacher, engine
            finally:
                engine.close()
        finally:
            policy.group.shutdown()
