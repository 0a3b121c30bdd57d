"""The `preference` stage: DPO and its relatives, on the model or on an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy, TrainedModels
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.stages.preflight import check_checkpoints, problems_of
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import StartModel, start_model, start_policy
from nemo_rl_like.stages.training import train
from nemo_rl_like.stages.workers import STEP_SERVICE, context_tokens, worker_group
from nemo_rl_like.training.data_recipe import DATA
from nemo_rl_like.training.moving_reference import MovingReference
from nemo_rl_like.training.preference import PreferenceRecipe
from nemo_rl_like.training.preference_service import check_preferences
from nemo_rl_like.training.step_services import STEPS

SERVICE = "nemo_rl_like.training.preference_service:PreferenceService"


class PreferenceStage:
    """Trains on preferences; its artifact is the final checkpoint."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint,)
    output_type: type[Artifact] = Checkpoint

    def __init__(self, stage_spec: PreferenceStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Problems of model, devices and data."""
        return problems_of(self.spec, self.stage, lambda: check_preferences(self.stage, self.spec.seed))

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Train, resuming from the newest valid checkpoint in the stage's folder."""
        spec, stage = self.spec, self.stage
        model = start_model(spec, context.folder, context.start_of(inputs))
        check_checkpoints(context.folder, model.identity)
        session = shared_session(spec.cluster, context.run_folder)
        with worker_group(session, "data") as workers:
            self._host_data(workers, model)
            policy = start_policy(session, spec, model)
            try:
                reference = self._reference(policy, model)
                policy.start_training(stage.optimizer, stage.steps)
                moving = None
                if reference is not None and stage.reference_sync is not None:
                    moving = MovingReference.start(policy, reference)
                recipe = PreferenceRecipe.of(stage, policy, workers, reference, moving)
                trained = TrainedModels(policy, reference=None if moving is None else moving.reference)
                return Checkpoint.of(train(spec, context, recipe, trained, model.identity, stage.checkpoint))
            finally:
                policy.group.shutdown()

    def _host_data(self, workers: WorkerGroup, model: StartModel) -> None:
        """Host the services `data` and `steps`."""
        kwargs: dict[str, object] = {
            "data": self.stage.data,
            "unpaired": self.stage.unpaired,
            "tokenizer_folder": str(model.folder.resolve()),
            "seed": self.spec.seed,
            "max_tokens": context_tokens(self.spec, model.config),
        }
        workers.host(DATA, SERVICE, kwargs)
        workers.host(STEPS, STEP_SERVICE)

    def _reference(self, policy: Policy, model: StartModel) -> Policy | None:
        """The model that the stage starts from, on the policy's ranks; None where no loss has a reference."""
        if not self.stage.needs_reference:
            return None
        if policy.adapted:
            return policy.base("reference")
        reference = Policy(policy.group, "reference")
        policy_spec = self.spec.policy
        on_host = policy_spec.offload.frozen
        reference.host(model.folder, policy_spec, self.spec.model.dtype, model.initialize, on_host=on_host)
        return reference
