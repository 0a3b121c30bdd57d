"""The `teacher_logits` stage: the teachers' likeliest tokens for a file of conversations, written once, read by `distill` stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import ray

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, Dataset
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.distill import TeacherDataSpec, TeacherLogitsStageSpec, domains_of
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.preflight import problems_of
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.shapes import config_of, renderer_of
from nemo_rl_like.stages.start_model import BASE
from nemo_rl_like.stages.teachers import LOGITS, asked_of, host_teachers, origin_of, teacher_checks, teacher_folders
from nemo_rl_like.stages.workers import worker_group
from nemo_rl_like.training.data_recipe import DATA
from nemo_rl_like.training.distillation import Teachers
from nemo_rl_like.training.teacher_logits_service import check_conversations

SERVICE = "nemo_rl_like.training.teacher_logits_service:TeacherLogitsService"
logger = logging.getLogger(__name__)


class TeacherLogitsStage:
    """Asks teachers; its artifact is the folder `logits`."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint, Dataset)
    output_type: type[Artifact] = Dataset

    def __init__(self, stage_spec: TeacherLogitsStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Problems of model, devices, data and teachers."""
        stage, checks = self.stage, teacher_checks(self.spec, self.stage)
        if stage.data.path is not None:
            checks.append(partial(check_conversations, stage.data.path, domains_of(stage.teachers)))
        return problems_of(self.spec, stage, *checks)

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Write the shards that are not there yet, then the manifest."""
        folder = context.folder / LOGITS
        folder.mkdir(exist_ok=True)
        for left in folder.glob(".tmp-*"):  # of a start that was killed
            left.unlink()
        session = shared_session(self.spec.cluster, context.run_folder)
        with worker_group(session, "data") as workers:
            folders = teacher_folders(self.stage, inputs)
            self._host_data(workers, context.folder, folder, folders, self._data(inputs))
            group = Policy.start_ranks(session, self.spec.policy)
            try:
                models = host_teachers(group, self.spec, folders)
                _write(workers, Teachers(models, asked_of(self.stage, config_of(self.spec))))
            finally:
                group.shutdown()
        return Dataset.of(folder)

    def _data(self, inputs: Mapping[str, Artifact]) -> TeacherDataSpec:
        """The data block, with the file that an earlier stage made."""
        data = self.stage.data
        return data if data.from_stage is None else data.made_at(str(inputs[data.from_stage].path.resolve()))

    def _host_data(
        self, workers: WorkerGroup, stage_folder: Path, folder: Path, teachers: Sequence[Path], data: TeacherDataSpec
    ) -> None:
        """Host the service `data`, with a copy of the policy's tokenizer."""
        spec, stage = self.spec, self.stage
        renderer = renderer_of(spec)
        renderer.tokenizer.save_pretrained(str(stage_folder / BASE))
        saved = Renderer.load(stage_folder / BASE)
        kwargs: dict[str, object] = {
            "path": data.file,
            "teachers": domains_of(stage.teachers),
            "origin": origin_of(spec, stage, teachers, data.file, saved, config_of(spec)),
            "folder": str(folder.resolve()),
            "tokenizer_folder": str((stage_folder / BASE).resolve()),
            "examples_per_shard": stage.examples_per_shard,
        }
        workers.host(DATA, SERVICE, kwargs)


def _write(workers: WorkerGroup, teachers: Teachers) -> None:
    """Shard by shard: rows, what the teachers say, onto disk."""
    count, missing = cast(tuple[int, list[int]], workers.call(DATA, "missing", what="shards that are there"))
    for number in missing:
        what = f"shard {number + 1} of {count}"
        batch = cast(ray.ObjectRef | None, workers.call(DATA, "batch", number, what=f"rows of {what}"))
        if batch is None:
            workers.call(DATA, "write_empty", number, what=what)
            continue
        tokens = workers.call(DATA, "write", number, batch, *teachers.top_logprobs(batch), what=what)
        logger.info("wrote %s: %s tokens", what, tokens)
    workers.call(DATA, "finish", what="manifest")
