"""A base with PEFT's adapters merged into it as one Hugging Face folder, for what reads a folder by itself."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.checkpoint.shards import disk_full_named
from nemo_rl_like.export.folders import copy_side_files, whole
from nemo_rl_like.model.foreign_folders import require_model_folder
from nemo_rl_like.model.hf_io import write_weights
from nemo_rl_like.model.merged_reader import merged_tensors
from nemo_rl_like.model.peft_config import require_folder

_GIB = 1 << 30


def write_merged(base: Path, adapter: Path, target: Path, shard_gib: float) -> None:
    """Write `base` with `adapter` merged to `target`, under a temporary name until it is whole; one shard is in memory at a time.

    Raises OutputFolderError if `target` exists and is not an empty folder, InputError for folders that are not what they should be, DiskFull.
    """
    if not base.is_dir():
        raise InputError(f"{base} is not a folder (looked in {Path.cwd()}); give the base as a Hugging Face folder")
    require_model_folder(base, "BASE", str(adapter))
    require_folder(adapter, "ADAPTER")
    with whole(target) as partial:
        with disk_full_named(partial, "the merged model"):
            write_weights(partial, merged_tensors(base, adapter), int(shard_gib * _GIB))
        copy_side_files(base, partial)
