"""Artifacts: what stages take and make. Each is a path and the hash of its content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nemo_rl_like.artifacts.hashing import hash_path


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or folder that a stage made, known by its content."""

    path: Path
    """The file or folder."""
    content_hash: str
    """SHA-256 (hex) of its content, see `hashing.hash_path`."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """The artifact at `path`, hashed now.

        Raises:
            InputError: `path` does not exist.
        """
        return cls(path, hash_path(path))


@dataclass(frozen=True, slots=True)
class Dataset(Artifact):
    """Examples or prompts: a JSONL file, or a folder of what teachers say of one."""


@dataclass(frozen=True, slots=True)
class Checkpoint(Artifact):
    """A model with or without its optimizer: a checkpoint folder `step_<n>`."""


@dataclass(frozen=True, slots=True)
class RewardModel(Artifact):
    """A model that scores."""


@dataclass(frozen=True, slots=True)
class Report(Artifact):
    """Measured results: a folder with `report.json`."""


@dataclass(frozen=True, slots=True)
class ServingBundle(Artifact):
    """What is served: a Hugging Face folder."""


ARTIFACT_TYPES: dict[str, type[Artifact]] = {
    kind.__name__: kind for kind in (Dataset, Checkpoint, RewardModel, Report, ServingBundle)
}
"""The artifact types by the name that `status.json` stores."""
