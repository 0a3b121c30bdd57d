"""A model's folder as an export has it, without what `nrl export` asks for around it."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.export.folders import whole
from nemo_rl_like.export.hf import copy_model


def copy_whole(source: Path, target: Path, shard_gib: float = 1.0) -> None:
    """Copy the Hugging Face folder `source` to `target`, under a temporary name until it is whole."""
    with whole(target) as partial:
        copy_model(source, partial, shard_gib)
