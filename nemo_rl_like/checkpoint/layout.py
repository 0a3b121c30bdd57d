"""The checkpoint folder on disk: names, manifest, verification.

`step_<n>/` holds `weights/*.safetensors`, `optimizer/*.safetensors`, `state.json` and, written last, `manifest.json` with
the size and SHA-256 of every file. A folder without a valid manifest is not a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError, NrlError
from nemo_rl_like.artifacts.files import sha256_file

FORMAT = 1
SECTIONS = ("weights", "optimizer")
"""Folders of a checkpoint with shards; a second model adds its own with a prefix."""
ADAPTER = "adapter"
"""A further one: the adapters of a policy that trains nothing else, whose `weights` are those of the merged model."""
STATE = "state.json"
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
TRASH = ".trash-"
_STEP = re.compile(r"step_(\d+)\Z")


class CheckpointError(NrlError):
    """A checkpoint cannot be written or is not what its manifest says."""


class DiskFull(CheckpointError):
    """The disk or the quota was used up during a save."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model a checkpoint belongs to."""

    fingerprint: str
    """Hash of what must be equal for the weights to fit (the model's configuration)."""
    description: str
    """The model in a few words, for people."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative POSIX path."""
    size: int
    """Bytes."""
    sha256: str
    """SHA-256 (hex) of its bytes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    """Step after which it was written."""
    model: ModelIdentity
    """The model it belongs to."""
    score: float | None
    """Value of the metric that ranks checkpoints, larger is better; None = not measured."""
    files: tuple[FileEntry, ...]
    """Every other file, sorted by path."""

    def to_json(self) -> bytes:
        """The manifest file's bytes."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


def step_name(step: int) -> str:
    """Folder name of the checkpoint after `step`."""
    return f"step_{step}"


def step_of(folder: Path) -> int | None:
    """The step in a folder's name, or None if it is not a checkpoint's."""
    match = _STEP.match(folder.name)
    return int(match.group(1)) if match else None


def step_folders(root: Path) -> list[Path]:
    """Folders below `root` that are named like a checkpoint, newest step first, valid or not."""
    if not root.is_dir():
        return []
    steps = {folder: step_of(folder) for folder in root.iterdir() if folder.is_dir()}
    return sorted((f for f, step in steps.items() if step is not None), key=lambda f: steps[f] or 0, reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """Parse `manifest.json`. Raises CheckpointError if it is missing or not a manifest of this format."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {data['format']} is not {FORMAT}, the one this version reads")
        files = tuple(FileEntry(**entry) for entry in data["files"])
        return Manifest(data["step"], ModelIdentity(**data["model"]), data["score"], files)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: the save did not finish") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def verify(folder: Path, *, hashes: bool = True) -> Manifest:
    """Check the manifest and every file's size and (unless `hashes` is false) SHA-256.

    Raises CheckpointError naming the file and what is wrong with it.
    """
    manifest = read_manifest(folder)
    if manifest.step != step_of(folder):
        raise CheckpointError(f"{folder}: the manifest says step {manifest.step}")
    for entry in manifest.files:
        _verify_file(folder / entry.path, entry, hashes)
    return manifest


def _verify_file(path: Path, entry: FileEntry, hashes: bool) -> None:
    try:
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f"{path} has {size} bytes, the manifest says {entry.size}: the file is cut or changed"
            )
        if hashes and (found := sha256_file(path)) != entry.sha256:
            raise CheckpointError(f"{path} has SHA-256 {found}, the manifest says {entry.sha256}: the file is damaged")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def require_model(manifest: Manifest, folder: Path, model: ModelIdentity) -> None:
    """Raises InputError naming both models if the checkpoint is not `model`'s."""
    if manifest.model.fingerprint != model.fingerprint:
        raise InputError(
            f"checkpoint {folder} belongs to another model: it holds {manifest.model.description} "
            f"({manifest.model.fingerprint[:12]}), the spec names {model.description} ({model.fingerprint[:12]}); "
            "use that model or another output folder"
        )


def read_state(folder: Path) -> Mapping[str, object]:
    """`state.json` as it was given to `commit`. Raises CheckpointError if it cannot be read."""
    try:
        state = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / STATE} holds a {type(state).__name__}, must be an object")
    return state
