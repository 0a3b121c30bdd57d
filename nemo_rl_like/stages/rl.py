"""The `rl` stage: reinforcement learning of the model or of an earlier checkpoint from an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, RewardModel
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy, TrainedModels
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.rl import OwnRanks, RlStageSpec
from nemo_rl_like.stages.preflight import (
    check_checkpoints,
    check_critic,
    check_first_weights,
    check_judge,
    check_stage_beside,
    check_tasks,
    check_teacher,
    problems_of,
    prompts_are_known_early,
)
from nemo_rl_like.stages.ptx import check_ptx, start_ptx
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import StartModel, start_model, start_policy, weights_of
from nemo_rl_like.stages.training import train
from nemo_rl_like.stages.workers import host_rollout, worker_group
from nemo_rl_like.training.engine import EngineClient, RunEngine, host_opponent
from nemo_rl_like.training.reinforcement import RlRecipe, dataflow_of
from nemo_rl_like.training.step_services import ROLLOUT, RlModels, StepServices, objective_of

ROLLOUTS = "rollouts.jsonl"


class RlStage:
    """Trains on rewards; its artifact is the final checkpoint."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint, RewardModel)
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
        checks.append(partial(_check_replay, self.spec, self.stage))
        if self.stage.loop is not None:
            checks.append(partial(dataflow_of, self.stage))
        if self.stage.teacher is not None:
            checks.append(partial(check_teacher, self.spec, self.stage.teacher))
        if self.stage.teacher_stage is not None:
            checks.append(partial(check_stage_beside, self.spec, "teacher_stage", self.stage.teacher_stage))
        if self.stage.critic is not None and self.stage.critic.path is not None:
            checks.append(partial(check_critic, self.spec, self.stage.critic.path))
        judge = self.stage.reward_model
        checks += [partial(check_judge, self.spec, path) for path in (judge.paths if judge is not None else ())]
        for name in judge.stages if judge is not None else ():
            checks.append(partial(check_stage_beside, self.spec, "reward_model.stages", name))
        return problems_of(self.spec, self.stage, partial(check_first_weights, self.spec, self.stage), *checks)

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Train, resuming from the newest valid checkpoint in the stage's folder."""
        spec, stage = self.spec, self.stage
        model = start_model(spec, context.folder, context.start_of(inputs))
        check_checkpoints(context.folder, model.identity)
        session = shared_session(spec.cluster, context.run_folder)
        with worker_group(session) as workers:
            host_rollout(workers, spec, model.folder, model.config)
            if not prompts_are_known_early(spec):
                workers.call(ROLLOUT, "check_prompts", "train", what="check of the prompts' lengths")
            with self._models(context, model, self._teacher_folder(inputs), self._judge_folders(inputs)) as (
                models,
                engine,
            ):
                rollouts = context.folder / ROLLOUTS if spec.logging.rollouts else None
                ptx = start_ptx(stage.ptx, workers, spec, model)
                services = StepServices(stage, spec.seed, models, engine, workers, rollouts, ptx)
                services.start_training()
                recipe = RlRecipe(services, dataflow_of(stage))
                trained = TrainedModels(models.policy, models.critic)
                return Checkpoint.of(train(spec, context, recipe, trained, model.identity, stage.checkpoint))

    @contextmanager
    def _models(
        self, context: StageContext, model: StartModel, teacher_folder: Path | None, judges: Sequence[Path]
    ) -> Iterator[tuple[RlModels, RunEngine]]:
        """The models that the algorithm reads, on the policy's ranks or on ranks of their own, and the engine."""
        spec, stage = self.spec, self.stage
        session = shared_session(spec.cluster, context.run_folder)
        with ExitStack() as stack:
            policy = start_policy(session, spec, model)
            stack.callback(policy.group.shutdown)
            host = partial(self._host, policy.group, stack)
            reference = None
            if stage.models_beside["reference"] and policy.adapted:
                reference = policy.base("reference")
            elif stage.models_beside["reference"]:
                reference = host("reference", model.folder, model.initialize)
            teacher = None if teacher_folder is None else host("teacher", teacher_folder)
            critic = None
            if stage.needs_critic:
                path = stage.critic_or_default.path
                start = (model.folder, model.initialize) if path is None else (Path(path), None)
                critic = host("critic", *start, score_head=True)
            scorers = tuple(
                host("reward_model", folder, service=f"reward-model-{i}") for i, folder in enumerate(judges)
            )
            opponent = self._opponent(policy, reference)
            records = spec.policy.router.replay == "engine"
            shape = (model.folder, spec.model.dtype, model.config)
            engine = RunEngine.start(spec.engine, policy, *shape, record_routes=records)
            stack.callback(engine.close)
            yield RlModels(policy, reference, teacher, critic, scorers, opponent), engine

    def _opponent(self, policy: Policy, reference: Policy | None) -> EngineClient | None:
        opponent = self.stage.algorithm.opponent
        if opponent is None or reference is None:
            return None
        return host_opponent(self.spec.engine, policy, reference, opponent)

    def _teacher_folder(self, inputs: Mapping[str, Artifact]) -> Path | None:
        """Folder of the teacher, as the spec names it."""
        if self.stage.teacher_stage is not None:
            return weights_of(inputs[self.stage.teacher_stage])
        return None if self.stage.teacher is None else Path(self.stage.teacher)

    def _judge_folders(self, inputs: Mapping[str, Artifact]) -> list[Path]:
        """Folders of the reward models, as the spec names them."""
        judge = self.stage.reward_model
        if judge is None:
            return []
        return [*(Path(path) for path in judge.paths), *(weights_of(inputs[name]) for name in judge.stages)]

    def _host(
        self,
        shared: WorkerGroup,
        stack: ExitStack,
        model: OwnRanks,
        folder: Path,
        initialize: int | None = None,
        *,
        service: str = "",
        score_head: bool = False,
    ) -> Policy:
        """A further model: on the policy's ranks in turn with it, or on ranks of its own, which end with the stack."""
        spec, name = self.spec, service or model
        on_host = spec.policy.offload.frozen and model != "critic"
        if model not in self.stage.own_ranks:
            found = Policy(shared, name)
            found.host(folder, spec.policy, spec.model.dtype, initialize, score_head=score_head, on_host=on_host)
            return found
        found = Policy.start(
            shared.session,
            spec.policy,
            folder,
            spec.model.dtype,
            initialize,
            name=name,
            score_head=score_head,
            on_host=on_host,
        )
        stack.callback(found.group.shutdown)
        return found


def _check_replay(spec: ExperimentSpec, stage: RlStageSpec) -> None:
    """A stage whose updates are to send tokens to the experts of the log-prob pass has one. Raises SpecError."""
    if spec.policy.router.replay == "none":
        return
    field = f"`policy.router.replay` is {spec.policy.router.replay}, but stage {stage.name}"
    if stage.algorithm.pairs is not None:
        raise SpecError(f"{field} trains on pairs, which have no log-prob pass of their own; leave `replay` out")
    if spec.policy.router.replay == "engine":
        _check_engine_records(spec)
        return
    if objective_of(stage).on_policy:
        raise SpecError(
            f"{field} makes one update a step without a log-prob pass before it; set `algorithm.recompute_proximal: always` or "
            "`updates_per_batch: 2`, or leave `replay` out"
        )


def _check_engine_records(spec: ExperimentSpec) -> None:
    """The engine tells the experts of its tokens. Raises SpecError."""
    if spec.engine.kind == "vllm":
        raise SpecError(
            "`policy.router.replay` is engine, but `engine.kind` is vllm: its record of experts needs vLLM's second model runner, which needs "
            "Triton and so does not start on a CPU, and has not been run; set `engine.kind: embedded`, or `replay: first_pass`"
        )
