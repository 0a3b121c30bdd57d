"""The `distill` stage: a student learns its teachers' distributions on the data's responses and on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, Dataset
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.policy.client import Policy, TrainedModels
from nemo_rl_like.spec.distill import DistillDataSpec, DistillStageSpec, TeacherLogitsStageSpec, domains_of
from nemo_rl_like.spec.experiment import ExperimentSpec, stage_name
from nemo_rl_like.stages.preflight import check_checkpoints, check_first_weights, problems_of
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.shapes import config_of, renderer_of
from nemo_rl_like.stages.start_model import StartModel, start_model, start_policy
from nemo_rl_like.stages.teachers import LOGITS, asked_of, host_teachers, origin_of, teacher_checks, teacher_folders
from nemo_rl_like.stages.training import train
from nemo_rl_like.stages.workers import context_tokens, worker_group
from nemo_rl_like.training.data_recipe import DATA
from nemo_rl_like.training.distillation import DistillationRecipe, Teachers
from nemo_rl_like.training.distillation_service import check_distillation, open_stored
from nemo_rl_like.training.engine import RunEngine

SERVICE = "nemo_rl_like.training.distillation_service:DistillationService"


class DistillStage:
    """Trains a student; its artifact is the final checkpoint."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint, Dataset)
    output_type: type[Artifact] = Checkpoint

    def __init__(self, stage_spec: DistillStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Problems of model, devices, data, teachers, and of the engine or of stored log-probs."""
        spec, stage = self.spec, self.stage
        checks: list[Callable[[], object]] = [
            *teacher_checks(spec, stage),
        ]
        if stage.data.from_stage is None:
            checks.append(partial(check_distillation, stage, spec.seed))
        if stage.sampled_per_step:
            checks.append(partial(check_first_weights, spec, stage))
        stored = stage.data.stored_logits
        if stored is not None and stage.data.from_stage is None and not self._is_made_before(stored):
            checks.append(lambda: self._check_stored(stored))
        return problems_of(spec, stage, *checks)

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Train, resuming from the newest valid checkpoint in the stage's folder."""
        spec, stage = self.spec, self.stage
        model = start_model(spec, context.folder, context.start_of(inputs))
        check_checkpoints(context.folder, model.identity)
        session = shared_session(spec.cluster, context.run_folder)
        with worker_group(session, "data") as workers:
            folders = teacher_folders(stage, inputs)
            self._host_data(workers, model, folders, self._data(inputs))
            policy = start_policy(session, spec, model)
            try:
                with self._engine(policy, model) as engine:
                    models = () if stage.data.is_stored else host_teachers(policy.group, spec, folders)
                    policy.start_training(stage.optimizer, stage.steps)
                    teachers = Teachers(models, asked_of(stage, model.config))
                    recipe = DistillationRecipe.of(stage, policy, workers, teachers, engine)
                    trained = TrainedModels(policy)
                    return Checkpoint.of(train(spec, context, recipe, trained, model.identity, stage.checkpoint))
            finally:
                policy.group.shutdown()

    @contextmanager
    def _engine(self, policy: Policy, model: StartModel) -> Iterator[RunEngine | None]:
        """What samples the student's responses; None where none are sampled."""
        if not self.stage.sampled_per_step:
            yield None
            return
        engine = RunEngine.start(self.spec.engine, policy, model.folder, self.spec.model.dtype, model.config)
        try:
            yield engine
        finally:
            engine.close()

    def _data(self, inputs: Mapping[str, Artifact]) -> DistillDataSpec:
        """The data block, with what earlier stages wrote."""
        data = self.stage.data
        if data.from_stage is not None:
            data = data.made_at(str(inputs[data.from_stage].path.resolve()))
        if data.stored_logits_stage is None:
            return data
        folder = str(inputs[data.stored_logits_stage].path)
        return data.model_copy(update={"stored_logits": folder})

    def _host_data(
        self, workers: WorkerGroup, model: StartModel, folders: Sequence[Path], data: DistillDataSpec
    ) -> None:
        """Host the service `data`."""
        spec, stage = self.spec, self.stage
        kwargs: dict[str, object] = {
            "data": data,
            "teachers": domains_of(stage.teachers),
            "origin": origin_of(spec, stage, folders, data.file, Renderer.load(model.folder), model.config),
            "tokenizer_folder": str(model.folder.resolve()),
            "seed": spec.seed,
            "max_tokens": context_tokens(spec, model.config),
        }
        workers.host(DATA, SERVICE, kwargs)

    def _check_stored(self, folder: str) -> None:
        """Stored log-probs are whole, and were made as this stage needs them. Raises InputError."""
        spec, stage = self.spec, self.stage
        known = stage.model_copy(update={"teachers": tuple(t for t in stage.teachers if t.stage is None)})
        folders = teacher_folders(known, {})
        open_stored(folder, origin_of(spec, known, folders, stage.data.file, renderer_of(spec), config_of(spec)))

    def _is_made_before(self, folder: str) -> bool:
        """Whether an earlier stage of this pipeline writes the folder."""
        before = self.spec.before(self.stage)
        made = [
            Path(self.spec.output) / stage_name(s) / LOGITS for s in before if isinstance(s, TeacherLogitsStageSpec)
        ]
        return Path(folder).resolve() in [path.resolve() for path in made]
