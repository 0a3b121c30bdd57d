"""The `rl` stage: reinforcement learning of the model or of an earlier checkpoint from an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import CRITIC, Policy, TrainedModels
from nemo_rl_like.spec.experiment import ExperimentSpec, RlStageSpec
from nemo_rl_like.stages.preflight import (
    check_checkpoints,
    check_critic,
    check_first_weights,
    check_tasks,
    check_teacher,
    problems_of,
    prompts_are_known_early,
)
from nemo_rl_like.stages.ptx import check_ptx, start_ptx
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import StartModel, start_model
from nemo_rl_like.stages.training import train
from nemo_rl_like.stages.workers import host_rollout, worker_group
from nemo_rl_like.training.engine import RunEngine
from nemo_rl_like.training.reinforcement import RlRecipe, dataflow_of
from nemo_rl_like.training.step_services import ROLLOUT, RlModels, StepServices

ROLLOUTS = "rollouts.jsonl"


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
        checks: list[Callable[[], object]] = [partial(check_tasks, self.spec, split) for split in splits]
        checks.append(partial(check_ptx, self.stage.ptx, self.spec))
        if self.stage.loop is not None:
            checks.append(partial(dataflow_of, self.stage.loop))
        if self.stage.teacher is not None:
            checks.append(partial(check_teacher, self.spec, self.stage.teacher))
        if self.stage.critic is not None and self.stage.critic.path is not None:
            checks.append(partial(check_critic, self.spec, self.stage.critic.path))
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
            with self._models(context, model) as (models, engine):
                rollouts = context.folder / ROLLOUTS if spec.logging.rollouts else None
                ptx = start_ptx(stage.ptx, workers, spec, model)
                services = StepServices(stage, spec.seed, models, engine, workers, rollouts, ptx)
                services.start_training()
                recipe = RlRecipe(services, dataflow_of(stage.loop))
                trained = TrainedModels(models.policy, models.critic)
                return Checkpoint.of(train(spec, context, recipe, trained, model.identity, stage.checkpoint))

    @contextmanager
    def _models(self, context: StageContext, model: StartModel) -> Iterator[tuple[RlModels, RunEngine]]:
        """The models that the algorithm reads, all on the policy's ranks, and the engine."""
        spec, stage = self.spec, self.stage
        session = shared_session(spec.cluster, context.run_folder)
        policy = Policy.start(session, spec.policy, model.folder, spec.model.dtype, model.initialize)
        host = partial(self._host, policy.group)
        try:
            models = RlModels(
                policy,
                reference=host("reference", model.folder, model.initialize) if stage.algorithm.kl.coef else None,
                teacher=host("teacher", Path(stage.teacher)) if stage.teacher is not None else None,
                critic=self._critic(policy.group, model) if stage.needs_critic else None,
            )
            engine = RunEngine.start(spec.engine, policy, model.folder, spec.model.dtype, model.config)
            try:
                yield models, engine
            finally:
                engine.close()
        finally:
            policy.group.shutdown()

    def _critic(self, group: WorkerGroup, model: StartModel) -> Policy:
        path = self.stage.critic_or_default.path
        if path is not None:
            return self._host(group, CRITIC, Path(path), score_head=True)
        return self._host(group, CRITIC, model.folder, model.initialize, score_head=True)

    def _host(
        self, group: WorkerGroup, name: str, folder: Path, initialize: int | None = None, *, score_head: bool = False
    ) -> Policy:
        """A further model on the policy's ranks."""
        found = Policy(group, name)
        found.host(folder, self.spec.policy, self.spec.model.dtype, initialize, score_head=score_head)
        return found
