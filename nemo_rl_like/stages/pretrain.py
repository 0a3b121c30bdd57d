"""The `pretrain` stage: next-token training of the model, or of an earlier checkpoint, on packed text."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint
from nemo_rl_like.data.document_ids import end_token
from nemo_rl_like.policy.client import TrainedModels
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.pretrain import PretrainStageSpec
from nemo_rl_like.stages.averaging import hand_on, start_average
from nemo_rl_like.stages.preflight import check_checkpoints, problems_of
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.shapes import config_of, renderer_of
from nemo_rl_like.stages.start_model import start_model, start_policy
from nemo_rl_like.stages.training import train
from nemo_rl_like.stages.workers import context_tokens, worker_group
from nemo_rl_like.training.data_recipe import DATA
from nemo_rl_like.training.pretrain_service import check_text, sequence_tokens_of
from nemo_rl_like.training.pretraining import PretrainRecipe

SERVICE = "nemo_rl_like.training.pretrain_service:PretrainService"


class PretrainStage:
    """Trains on text; its artifact is the final checkpoint."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint,)
    output_type: type[Artifact] = Checkpoint

    def __init__(self, stage_spec: PretrainStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Problems of model, devices, tokenizer, row length and text."""
        spec, stage = self.spec, self.stage
        return problems_of(
            spec,
            stage,
            lambda: end_token(renderer_of(spec).tokenizer),
            lambda: sequence_tokens_of(stage.sequence_tokens, context_tokens(spec, config_of(spec))),
            lambda: check_text(stage, spec.seed),
        )

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Train, resuming from the newest valid checkpoint in the stage's folder."""
        spec, stage = self.spec, self.stage
        model = start_model(spec, context.folder, context.start_of(inputs))
        check_checkpoints(context.folder, model.identity)
        session = shared_session(spec.cluster, context.run_folder)
        kwargs: dict[str, object] = {
            "data": stage.data,
            "tokenizer_folder": str(model.folder.resolve()),
            "seed": spec.seed,
            "sequence_tokens": sequence_tokens_of(stage.sequence_tokens, context_tokens(spec, model.config)),
            "validation_fraction": stage.data.validation_fraction,
        }
        with worker_group(session, "data") as workers:
            workers.host(DATA, SERVICE, kwargs)
            policy = start_policy(session, spec, model)
            try:
                average = start_average(stage.ema, policy, spec, model)
                policy.start_training(stage.optimizer, stage.steps)
                recipe = PretrainRecipe.of(stage, policy, workers, average)
                models = TrainedModels(policy, average=None if average is None else average.reference)
                trained = train(spec, context, recipe, models, model.identity, stage.checkpoint)
                return hand_on(stage.ema, average, trained, context, model.identity)
            finally:
                policy.group.shutdown()
