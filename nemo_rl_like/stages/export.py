"""The `export` stage: a checkpoint as a Hugging Face folder that plain transformers loads, its adapters as PEFT's, or bundles to serve."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, RewardModel, ServingBundle
from nemo_rl_like.export.bundle import ExportSource, How, write_bundles
from nemo_rl_like.export.targets import target_problems
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, stage_name
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.stages.shapes import config_of

FOLDER = "model"
BUNDLES = "bundles"


class ExportStage:
    """Writes the final model; its artifact is the folder."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint, RewardModel)
    output_type: type[Artifact] = ServingBundle

    def __init__(self, stage_spec: ExportStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """What the model or this host lacks for a target; the weights come from an earlier stage."""
        try:
            model = config_of(self._maker())
        except NrlError as error:
            return [str(error)]
        return [problem for target in self.stage.wanted for problem in target_problems(target, model)]

    def _maker(self) -> ExperimentSpec:
        """The experiment as the stage sees it whose checkpoint is exported."""
        before, named = self.spec.before(self.stage), self.stage.checkpoint
        makers = [s for s in before if (isinstance(s, TRAINING_STAGES) if named is None else stage_name(s) == named)]
        return self.spec.for_stage(makers[-1]) if makers else self.spec

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Stream the checkpoint's weights into shards of the asked size, prove them, and make every target of them; needs no GPU."""
        (checkpoint,) = inputs.values()
        target = context.folder / (BUNDLES if self.stage.targets else FOLDER)
        shutil.rmtree(target, ignore_errors=True)
        single = (self.stage.wanted[0], target)
        places = [(one, target / one.kind) for one in self.stage.targets] or [single]
        stage = self.stage
        how = How(stage.shard_gib, stage.parity, stage.parity_timeout_s, stage.license)
        write_bundles(ExportSource(checkpoint.path, self.spec, context.run_folder, context.lineage), places, how)
        return ServingBundle.of(target)
