"""The `export` stage: a checkpoint as a Hugging Face folder that plain transformers loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, RewardModel, ServingBundle
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader, write_hf_folder
from nemo_rl_like.policy.store import copy_side_files
from nemo_rl_like.spec.evaluate import ExportStageSpec
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.start_model import weights_of

FOLDER = "model"
_GIB = 1 << 30


class ExportStage:
    """Writes the final model; its artifact is the folder."""

    input_types: tuple[type[Artifact], ...] = (Checkpoint, RewardModel)
    output_type: type[Artifact] = ServingBundle

    def __init__(self, stage_spec: ExportStageSpec, experiment_spec: ExperimentSpec) -> None:
        self.stage = stage_spec
        self.spec = experiment_spec

    def preflight(self) -> list[str]:
        """Nothing of its own: it reads what an earlier stage wrote."""
        return []

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Stream the checkpoint's weights into shards of the asked size; needs no GPU."""
        (checkpoint,) = inputs.values()
        target = context.folder / FOLDER
        shutil.rmtree(target, ignore_errors=True)
        write_export(weights_of(checkpoint), target, self.stage.shard_gib)
        return ServingBundle.of(target)


def write_export(source: Path, target: Path, shard_gib: float) -> None:
    """Write the Hugging Face folder `source` to `target`, under a temporary name until it is whole.

    Raises OutputFolderError if `target` exists and is not an empty folder, InputError for damaged weights.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputFolderError(f"{target} exists and is not an empty folder; choose another or remove it")
    partial = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with SafetensorsReader(source) as reader:
        write_hf_folder(
            partial, ModelConfig.from_hf_folder(source), _tensors(reader), None, shard_bytes=int(shard_gib * _GIB)
        )
    copy_side_files(source, partial)  # its own config.json, with the special tokens' ids
    if target.exists():
        target.rmdir()
    partial.rename(target)


def _tensors(reader: SafetensorsReader) -> Iterator[tuple[str, Tensor]]:
    for name in reader.keys():
        yield name, reader.get(name)
