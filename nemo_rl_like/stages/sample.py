"""The `sample` stage: best-of-n and rejection sampling from the environment into a supervised dataset."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from nemo_rl_like.artifacts.errors import InputError, StoppedBySignal
from nemo_rl_like.artifacts.files import atomic_write
from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, Dataset
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.observe.terminal import Terminal
from nemo_rl_like.rollout.choice import Counts
from nemo_rl_like.rollout.sample_service import Part, read_part
from nemo_rl_like.rollout.taskorder import TaskList
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.stages.evaluate import evaluator
from nemo_rl_like.stages.preflight import check_first_weights, check_tasks, problems_of, prompts_are_known_early
from nemo_rl_like.stages.start_model import start_model
from nemo_rl_like.training.engine import RunEngine
from nemo_rl_like.training.signals import StopRequest
from nemo_rl_like.training.step_services import ROLLOUT

SERVICE = "nemo_rl_like.rollout.sample_service:SampleService"
DATASET = "dataset.jsonl"
REPORT = "report.json"
PARTS = "parts"


class SampleStage:
    """Keeps the best answers to training tasks; its artifact is `dataset.jsonl`, and `report.json` beside it tells the counts."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint,)
    output_type: type[Artifact] = Dataset

    def __init__(self, stage_spec: SampleStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Problems of model, devices, engine, environment and prompts."""
        spec = self.spec
        return problems_of(
            spec, self.stage, partial(check_first_weights, spec, self.stage), lambda: check_tasks(spec, "train")
        )

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Draw the parts that are not there yet, then join all of them."""
        model = start_model(self.spec, context.folder, context.start_of(inputs))
        with evaluator(self.spec, context.run_folder, model, SERVICE) as (workers, engine):
            if not prompts_are_known_early(self.spec):
                workers.call(ROLLOUT, "check_prompts", "train", self.stage.tasks, what="check of the prompts' lengths")
            parts = _Drawing(self.stage, context, workers, engine).parts()
        return _joined(context.folder, parts, self.stage)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The loop over batches of prompts."""

    stage: SampleStageSpec
    context: StageContext
    workers: WorkerGroup
    engine: RunEngine

    def parts(self) -> list[Part]:
        """Every part, in the order of the tasks. Raises StoppedBySignal after the batch in which a signal came."""
        folder = self.context.folder / PARTS
        folder.mkdir(exist_ok=True)
        tasks = cast(TaskList, self.workers.call(ROLLOUT, "task_list", "train", what="list of training tasks"))
        total, size = len(tasks.ids[: self.stage.tasks]), self.stage.prompts_per_batch
        files = {first: folder / f"{first:08d}.json" for first in range(0, total, size)}
        done, terminal = Counts(), Terminal()
        with StopRequest() as stop, terminal.progress(self.context.stage_name, len(files)) as bar:
            for number, (first, file) in enumerate(files.items(), 1):
                done += self._part(first, min(size, total - first), file)
                bar.advance()
                terminal.metrics(number, len(files), _shown(done))
                if stop.received:
                    raise StoppedBySignal(
                        f"{stop.received}: stopped after {done.prompts} of {total} prompts, which are kept; a resumed run goes on there"
                    )
        return [read_part(file) for file in files.values()]

    def _part(self, first: int, count: int, file: Path) -> Counts:
        if file.is_file():
            return read_part(file).counts
        args = (self.stage, first, count, self.engine.version, self.engine.client(), str(file))
        return cast(Counts, self.workers.call(ROLLOUT, "draw", *args, what=f"samples of {count} tasks from {first} on"))


def _shown(counts: Counts) -> dict[str, float]:
    """The progress line's numbers."""
    return {name: value for name, value in counts.report().items() if value is not None and name != "prompts_kept"}


def _joined(folder: Path, parts: list[Part], stage: SampleStageSpec) -> Dataset:
    """Report and dataset of all parts. Raises InputError if nothing was kept."""
    counts = sum((part.counts for part in parts), Counts())
    if not counts.kept:
        raise InputError(
            f"none of {counts.samples} samples can be kept: {counts.invalid} are invalid, {counts.truncated} were cut by a limit, and "
            f"`min_reward` is {stage.min_reward} where the mean reward is {counts.report()['reward_before']}; lower `min_reward`, raise "
            "`samples_per_prompt` or `sampling.max_new_tokens`, or sample from a better model"
        )
    report = {"stage": stage.model_dump(mode="json"), **counts.report()}
    atomic_write(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode())
    lines = [line for part in parts for line in part.lines]
    atomic_write(folder / DATASET, "".join(f"{line}\n" for line in lines).encode())
    shutil.rmtree(folder / PARTS)
    return Dataset.of(folder / DATASET)
