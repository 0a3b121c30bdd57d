"""Opens checkpoints: the newest valid one, its state, its tensors one at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from nemo_rl_like.checkpoint.layout import (
    CheckpointError,
    Manifest,
    ModelIdentity,
    read_state,
    require_model,
    step_folders,
    verify,
)
from nemo_rl_like.checkpoint.shards import LazyTensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointReader:
    """A checkpoint whose files were verified."""

    folder: Path
    """Its folder."""
    manifest: Manifest
    """What it holds."""
    state: Mapping[str, object]
    """The state that was committed with it."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Verify every file and open. Raises CheckpointError naming the file and what is wrong with it."""
        return cls(folder, verify(folder), read_state(folder))

    @classmethod
    def latest(cls, root: Path) -> Self | None:
        """The newest valid checkpoint below `root`, or None. A damaged one is skipped with a warning that says why."""
        for folder in step_folders(root):
            try:
                return cls.open(folder)
            except CheckpointError as error:
                logger.warning("skipping checkpoint %s: %s", folder.name, error)
        return None

    @property
    def step(self) -> int:
        """Step after which it was written."""
        return self.manifest.step

    def require_model(self, model: ModelIdentity) -> None:
        """Raises InputError naming both models if this is another model's checkpoint."""
        require_model(self.manifest, self.folder, model)

    def tensors(self, section: Literal["weights", "optimizer"]) -> LazyTensors:
        """The section's tensors by name, read when asked for."""
        return LazyTensors(self.folder / section)
