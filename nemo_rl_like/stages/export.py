"""The `export` stage: a checkpoint as a Hugging Face folder that plain transformers loads, or its adapters alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError, OutputFolderError
from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, RewardModel, ServingBundle
from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.checkpoint.shards import disk_full_named
from nemo_rl_like.model import lora_stacked, prefix
from nemo_rl_like.model.hf_copy import copy_weights
from nemo_rl_like.model.hf_io import SafetensorsReader, copy_tokenizer
from nemo_rl_like.model.virtual_tokens import PROMPT
from nemo_rl_like.model.weight_entries import PREFIX
from nemo_rl_like.policy.store import copy_side_files
from nemo_rl_like.spec.evaluate import ExportStageSpec
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.start_model import weights_of

FOLDER = "model"
ADAPTER_FILE = "adapter_model.safetensors"
"""PEFT's name."""
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
        export(checkpoint, target, self.stage.shard_gib, adapter=self.stage.adapter)
        return ServingBundle.of(target)


def export(checkpoint: Artifact, target: Path, shard_gib: float, *, adapter: bool) -> None:
    """Write the checkpoint's whole model, or its adapters alone. Raises as `write_export` and `write_adapter`."""
    if adapter:
        write_adapter(checkpoint.path, target)
    else:
        write_export(weights_of(checkpoint), target, shard_gib)


def write_export(source: Path, target: Path, shard_gib: float) -> None:
    """Write the Hugging Face folder `source` to `target`, under a temporary name until it is whole.

    Raises OutputFolderError if `target` exists and is not an empty folder, InputError for damaged weights.
    """
    with _whole(target) as partial:
        with disk_full_named(partial, "the export"):
            copy_weights(source, partial, int(shard_gib * _GIB))
        copy_side_files(source, partial)  # its own config.json, with the special tokens' ids


def write_adapter(checkpoint: Path, target: Path) -> None:
    """Write the checkpoint's adapters to `target` as PEFT does, with the tokenizer beside them; bottleneck adapters by names of their own.

    Raises InputError if it has none, and as `write_export`.
    """
    source = checkpoint / ADAPTER
    if not source.is_dir():
        raise InputError(
            f"{checkpoint} has no adapters: its run trained the whole model; leave `adapter` out, or train with `policy.lora` or `policy.adapter`"
        )
    with _whole(target) as partial:
        with SafetensorsReader(source) as reader:
            save_file(_as_peft(dict(_tensors(reader))), partial / ADAPTER_FILE, metadata={"format": "pt"})
        copy_side_files(source, partial)
        copy_tokenizer(checkpoint / "weights", partial)


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A folder that takes the name `target` when the block ends well. Raises OutputFolderError if that is taken."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputFolderError(f"{target} exists and is not an empty folder; choose another or remove it")
    partial = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        target.rmdir()
    partial.rename(target)


def _as_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """PEFT has the prefixes of all layers in one tensor, and adapters of stacked experts as matrices; all else as it is."""
    if any(name.startswith(PREFIX) for name in tensors):
        return {PROMPT: prefix.as_peft(tensors)}
    return lora_stacked.as_peft(tensors)


def _tensors(reader: SafetensorsReader) -> Iterator[tuple[str, Tensor]]:
    for name in reader.keys():
        yield name, reader.get(name)
