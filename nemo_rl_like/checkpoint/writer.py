"""Writes a checkpoint in two phases: many processes write shards under a temporary name, one commits them."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from nemo_rl_like.artifacts import faults
from nemo_rl_like.artifacts.files import atomic_write, fsync_folder, sha256_file
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.checkpoint.layout import (
    MANIFEST,
    SECTIONS,
    STATE,
    TEMPORARY,
    TRASH,
    CheckpointError,
    FileEntry,
    Manifest,
    ModelIdentity,
    step_folders,
    step_name,
    verify,
)
from nemo_rl_like.checkpoint.shards import disk_full_named
from nemo_rl_like.tensors.shards import INDEX, ShardFile, index_json

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """One checkpoint being written. As a context manager it removes the temporary folder unless it was committed.

    ```python
    with CheckpointWriter(root, step, model) as writer:
        folder = writer.begin()
        ...                                  # every rank: with section_writer(folder, "weights", rank) as shards: ...
        writer.commit(state, shards)         # shards: what all the writers returned
    ```
    """

    def __init__(self, root: Path, step: int, model: ModelIdentity, sections: Sequence[str] = SECTIONS) -> None:
        self._root, self._step, self._model, self._sections = root, step, model, sections
        self._temporary = root / f"{TEMPORARY}{step_name(step)}"
        self._final = root / step_name(step)

    def begin(self) -> Path:
        """Remove what earlier saves left unfinished and make the temporary folder; returns it.

        Raises CheckpointError if a valid checkpoint of this step exists, DiskFull if there is no space at all.
        """
        with disk_full_named(self._root, "a new folder"):
            self._root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._root)
            if self._final.exists():
                self._make_room()
            for section in self._sections:
                (self._temporary / section).mkdir(parents=True)
        return self._temporary

    def _make_room(self) -> None:
        try:
            verify(self._final)
        except CheckpointError as error:
            logger.warning("replacing a damaged checkpoint: %s", error)
            remove_folder(self._final)
            return
        raise CheckpointError(f"{self._final} exists and is valid; continue from it or choose another output folder")

    def commit(self, state: Mapping[str, JSON], shards: Iterable[ShardFile], *, score: float | None = None) -> Path:
        """Make the checkpoint real: index and state, fsync, rename, manifest; returns its final folder.

        `state` comes back from the reader as it is given. `score` ranks it for keep-best, larger is better; one that is not finite counts as not measured.
        Raises CheckpointError for a shard that is missing or not of the size that its writer reported, DiskFull.
        """
        files = list(shards)
        with disk_full_named(self._temporary, "state and manifest"):
            entries = self._complete(state, files)
            for folder in (*(self._temporary / section for section in self._sections), self._temporary):
                fsync_folder(folder)
            self._temporary.rename(self._final)
            fsync_folder(self._root)
            faults.point("checkpoint.before_manifest")
            ranked = score if score is not None and math.isfinite(score) else None
            manifest = Manifest(self._step, self._model, ranked, entries)
            atomic_write(self._final / MANIFEST, manifest.to_json())
        return self._final

    def _complete(self, state: Mapping[str, JSON], shards: list[ShardFile]) -> tuple[FileEntry, ...]:
        """Write the indices and the state; returns the entries of all files, hashing only what no shard writer did."""
        for section in self._sections:
            mine = [shard for shard in shards if shard.path.startswith(f"{section}/")]
            try:
                atomic_write(self._temporary / section / INDEX, index_json(mine))
            except ValueError as error:
                raise CheckpointError(f"{self._temporary / section}: {error}") from error
        text = json.dumps(dict(state), indent=1, sort_keys=True, allow_nan=False)
        atomic_write(self._temporary / STATE, (text + "\n").encode())
        known = {shard.path: FileEntry(shard.path, shard.size, shard.sha256) for shard in shards}
        found = {p.relative_to(self._temporary).as_posix(): p for p in self._temporary.rglob("*") if p.is_file()}
        for path, entry in known.items():
            if path not in found or found[path].stat().st_size != entry.size:
                raise CheckpointError(f"{self._temporary / path} is not the {entry.size} bytes its writer reported")
        return tuple(known.get(path) or _entry(path, file) for path, file in sorted(found.items()))

    def abort(self) -> None:
        """Remove what was written and is not a checkpoint."""
        for folder in (self._temporary, self._final):
            if folder.exists() and not (folder / MANIFEST).exists():
                remove_folder(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def remove_leftovers(root: Path) -> None:
    """Remove temporary and trash folders and step folders without a manifest: saves or deletions that never ended."""
    half = [folder for folder in step_folders(root) if not (folder / MANIFEST).exists()]
    hidden = [f for f in root.iterdir() if f.is_dir() and f.name.startswith((TEMPORARY, TRASH))]
    for folder in (*half, *hidden):
        logger.warning("removing %s, left by a save that did not finish", folder)
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that a crash in between leaves no half checkpoint: renamed to a trash name first."""
    trash = folder
    if not folder.name.startswith(TRASH):
        trash = folder.with_name(f"{TRASH}{folder.name.lstrip('.')}-{os.getpid()}")
        folder.rename(trash)
        fsync_folder(folder.parent)
    shutil.rmtree(trash)


def _entry(path: str, file: Path) -> FileEntry:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return FileEntry(path, file.stat().st_size, sha256_file(file))
