"""The `reward_model` stage: a model that scores, from pairs, ratings or judged steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, RewardModel
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.policy.client import Policy, TrainedModels
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.stages.preflight import check_checkpoints, problems_of
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import start_model
from nemo_rl_like.stages.training import train
from nemo_rl_like.stages.workers import context_tokens, worker_group
from nemo_rl_like.training.data_recipe import DATA
from nemo_rl_like.training.reward_model import RewardModelRecipe
from nemo_rl_like.training.reward_service import check_reward_data

SERVICE = "nemo_rl_like.training.reward_service:RewardDataService"


class RewardModelStage:
    """Trains a score head and the model under it; its artifact is the final checkpoint."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint,)
    output_type: type[Artifact] = RewardModel

    def __init__(self, stage_spec: RewardModelStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    @property
    def _seed(self) -> int:
        return self.spec.seed if self.stage.seed is None else self.stage.seed

    def preflight(self) -> list[str]:
        """Problems of model, devices and data."""
        return problems_of(self.spec, self.stage, lambda: check_reward_data(self.stage, self._seed))

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Train, resuming from the newest valid checkpoint in the stage's folder."""
        spec, stage = self.spec, self.stage
        started = start_model(spec, context.folder, context.start_of(inputs))
        model = replace(started, config=replace(ModelConfig.from_hf_folder(started.folder), score_head=True))
        check_checkpoints(context.folder, model.identity)
        session = shared_session(spec.cluster, context.run_folder)
        kwargs: dict[str, object] = {
            "data": stage.data,
            "loss": stage.loss,
            "tokenizer_folder": str(model.folder.resolve()),
            "seed": self._seed,
            "max_tokens": context_tokens(spec, model.config),
        }
        with worker_group(session, "data") as workers:
            workers.host(DATA, SERVICE, kwargs)
            scorer = Policy.start(
                session,
                spec.policy,
                model.folder,
                spec.model.dtype,
                model.initialize,
                score_head=True,
                score_head_seed=self._seed,
            )
            try:
                scorer.start_training(stage.optimizer, stage.steps)
                recipe = RewardModelRecipe.of(stage, scorer, workers)
                trained = train(spec, context, recipe, TrainedModels(scorer), model.identity, stage.checkpoint)
                return RewardModel.of(trained)
            finally:
                scorer.group.shutdown()
