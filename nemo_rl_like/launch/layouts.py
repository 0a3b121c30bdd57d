"""Layouts that a job's models cannot be split by, told before the job waits in a queue; a model that is not on this host is examined where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, stage_name
from nemo_rl_like.spec.model import ModelSpec


def problems(spec: ExperimentSpec, working_folder: Path) -> Iterator[str]:
    """One line for each model and layout of the training stages that do not fit each other, or that this package does not train."""
    told = set()
    for stage in spec.stages:
        seen = spec.for_stage(stage)
        if not isinstance(stage, TRAINING_STAGES) or seen.policy.backend != "megatron":
            continue
        where = "" if stage.settings is None else f"stages.{stage_name(stage)}.settings."
        found = _problem(seen, working_folder, f"{where}policy.")
        if found is not None and found not in told:
            yield found
        told.add(found)


def _problem(spec: ExperimentSpec, working_folder: Path, block: str) -> str | None:
    """What is wrong with a stage's model, or with its layout, whose fields are told as those of `block`."""
    try:
        config = _shape(spec.model, working_folder)
    except InputError as error:
        return str(error)
    try:
        if config is not None:
            config.check_layout(spec.policy.layout)
    except InputError as error:
        return f"{block}{error}"
    return None


def _shape(model: ModelSpec, working_folder: Path) -> ModelConfig | None:
    """The model's shape; None where its folder is not on this host, or has no configuration yet."""
    if model.init is not None:
        return ModelConfig.from_init(model.init, vocab_size=1)  # no layout depends on it
    folder = working_folder / str(model.path)
    return ModelConfig.from_hf_folder(folder) if (folder / "config.json").is_file() else None
