"""The `sft` stage: supervised fine-tuning of the model or of an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, Dataset
from nemo_rl_like.policy.client import TrainedModels
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.sft import SftDataSpec, SftStageSpec
from nemo_rl_like.stages.averaging import hand_on, start_average
from nemo_rl_like.stages.preflight import check_checkpoints, problems_of
from nemo_rl_like.stages.ptx import check_ptx, start_ptx
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import start_model, start_policy
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
        return problems_of(
            spec,
            self.stage,
            lambda: check_data(data, environment_of(spec), spec.seed),
            lambda: check_ptx(self.stage.ptx, spec),
        )

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Train, resuming from the newest valid checkpoint in the stage's folder."""
        spec = self.spec
        model = start_model(spec, context.folder, context.start_of(inputs))
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
            ptx = start_ptx(self.stage.ptx, workers, spec, model)
            policy = start_policy(session, spec, model)
            try:
                average = start_average(self.stage.ema, policy, spec, model)
                policy.start_training(self.stage.optimizer, self.stage.steps)
                recipe = SftRecipe.of(self.stage, policy, workers, average, ptx)
                models = TrainedModels(policy, average=None if average is None else average.reference)
                trained = train(spec, context, recipe, models, model.identity, self.stage.checkpoint)
                return hand_on(self.stage.ema, average, trained, context, model.identity)
            finally:
                policy.group.shutdown()


def _with_file(data: SftDataSpec, inputs: Mapping[str, Artifact]) -> SftDataSpec:
    """The data with the file that an earlier stage made, where one did."""
    for name, artifact in inputs.items():
        if isinstance(artifact, Dataset):
            return data.model_copy(update={"path": str(artifact.path.resolve()), "from_stage": name})
    return data
