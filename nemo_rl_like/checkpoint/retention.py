"""Which checkpoints stay: the newest, the best, and always the newest valid one."""

from __future__ import annotations

import logging
from pathlib import Path

from nemo_rl_like.checkpoint.layout import CheckpointError, Manifest, step_folders, verify
from nemo_rl_like.checkpoint.writer import remove_folder

logger = logging.getLogger(__name__)


def retain(root: Path, *, keep_last: int, keep_best: int = 0) -> list[Path]:
    """Delete the checkpoints that are neither among the `keep_last` newest nor the `keep_best` best; returns those deleted.

    Only valid ones count, so the newest valid checkpoint is never deleted; a damaged one is left where it is and named in
    the log. The newest is verified by hash, older ones by size. Equal scores: the newer one is better.
    Raises ValueError if `keep_last` is below 1.
    """
    if keep_last < 1:
        raise ValueError(f"`keep_last` is {keep_last}, must be at least 1")
    valid = _valid(root)
    scores = {folder: manifest.score for folder, manifest in valid.items() if manifest.score is not None}
    best = sorted(scores, key=lambda folder: scores[folder], reverse=True)[:keep_best]
    kept = {*list(valid)[:keep_last], *best}
    gone = [folder for folder in valid if folder not in kept]
    for folder in gone:
        remove_folder(folder)
    return gone


def _valid(root: Path) -> dict[Path, Manifest]:
    """Valid checkpoints, newest first."""
    valid: dict[Path, Manifest] = {}
    for folder in step_folders(root):
        try:
            valid[folder] = verify(folder, hashes=not valid)
        except CheckpointError as error:
            logger.warning("not counting checkpoint %s: %s", folder.name, error)
    return valid
