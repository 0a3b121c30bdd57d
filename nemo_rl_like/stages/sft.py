"""The `sft` stage: supervised fine-tuning of the model or of an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, Dataset
from nemo_rl_like.policy.client import Policy, TrainedModels
from nemo_rl_like.spec.experiment import ExperimentSpec, SftDataSpec, SftStageSpec
from nemo_rl_like.stages.preflight import check_checkpoints, problems_of
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import start_model
from nemo_rl_like.stages.training import train
from nemo_rl_like.stages.workers import context_tokens, environment_of, worker_group
from nemo_rl_like.training.data_recipe import DATA
from nemo_rl_like.training.sft_service import check_data
from nemo_rl_like.training.supervised import SftRecipe

SERVICE = "nemo_rl_like.training.sft_service:SftService"


class SftStage:
    """Trains on conversations; its artifact is the final checkpoint."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint, Dataset)
    output_type: type[Artifact] = Checkpoint

    def __init__(self, stage_spec: SftStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Problems of model, devices, environment and data."""
        spec, data = self.spec, self.stage.data
        return problems_of(spec, lambda: check_data(data, environment_of(spec), spec.seed))

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Train, resuming from the newest valid checkpoint in the stage's folder."""
        spec = self.spec
        models = {name: artifact for name, artifact in inputs.items() if isinstance(artifact, Checkpoint)}
        model = start_model(spec, context.folder, models)
        check_checkpoints(context.folder, model.identity)
        session = shared_session(spec.cluster, context.run_folder)
        kwargs: dict[str, object] = {
            "data": _with_file(self.stage.data, inputs),
            "environment": environment_of(spec),
            "tokenizer_folder": str(model.folder.resolve()),
            "seed": spec.seed,
            "max_tokens": context_tokens(spec, model.config),
        }
        with worker_group(session, "data") as workers:
            workers.host(DATA, SERVICE, kwargs)
            policy = Policy.start(session, spec.policy, model.folder, spec.model.dtype, model.initialize)
            try:
                policy.start_training(self.stage.optimizer, self.stage.steps)
                recipe = SftRecipe.of(self.stage, policy, workers)
                return Checkpoint.of(
                    train(spec, context, recipe, TrainedModels(policy), model.identity, self.stage.checkpoint)
                )
            finally:
                policy.group.shutdown()


def _with_file(data: SftDataSpec, inputs: Mapping[str, Artifact]) -> SftDataSpec:
    """The data with the file that an earlier stage made, where one did."""
    for name, artifact in inputs.items():
        if isinstance(artifact, Dataset):
            return data.model_copy(update={"path": str(artifact.path.resolve()), "from_stage": name})
    return data
