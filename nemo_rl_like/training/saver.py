"""Saves a stage's checkpoints, at once or while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.checkpoint.layout import ModelIdentity, step_name
from nemo_rl_like.checkpoint.retention import retain
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.policy.client import PendingSave, TrainedModels
from nemo_rl_like.spec.stage import CheckpointSpec
from nemo_rl_like.tensors.shards import ShardFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A save whose tensors are copied, and being written."""

    writer: CheckpointWriter
    state: Mapping[str, JSON]
    score: float | None
    models: tuple[PendingSave, ...]


@dataclass(slots=True)
class Saver:
    """Saves the models of one stage under `root`; at most one save is being written."""

    root: Path
    identity: ModelIdentity
    models: TrainedModels
    spec: CheckpointSpec
    _begun: _Begun | None = field(default=None, init=False)

    def save(self, step: int, state: Mapping[str, JSON], score: float | None) -> Path:
        """Save the models as they are now; returns the folder that the checkpoint has, or with `asynchronous` will have.

        `state` and `score` as for `CheckpointWriter.commit`. Raises CheckpointError, also for the save before this one.
        """
        self.finish()
        with ExitStack() as unless_committed:
            writer = unless_committed.enter_context(
                CheckpointWriter(self.root, step, self.identity, self.models.sections)
            )
            folder = writer.begin()
            if self.spec.asynchronous:
                self._begun = _Begun(writer, state, score, self.models.begin_save(folder))
                unless_committed.pop_all()
            else:
                self._commit(writer, state, score, self.models.save(folder))
        return self.root / step_name(step)

    def poll(self) -> None:
        """Commit the save that is being written if its ranks have ended. Raises CheckpointError if they could not write."""
        if self._begun is not None and all(model.ended for model in self._begun.models):
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is being written, if there is one, and commit it. Raises as `poll`."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        with begun.writer:
            shards = tuple(shard for model in begun.models for shard in model.shards())
            self._commit(begun.writer, begun.state, begun.score, shards)

    def salvage(self) -> None:
        """As `finish`, after an error of another kind, which stays the one to tell: what fails here is logged."""
        try:
            self.finish()
        except NrlError as error:
            logger.warning("the save that was being written is lost: %s", error)

    def _commit(
        self, writer: CheckpointWriter, state: Mapping[str, JSON], score: float | None, shards: Sequence[ShardFile]
    ) -> None:
        folder = writer.commit(state, shards, score=score)
        retain(self.root, keep_last=self.spec.keep_last, keep_best=self.spec.keep_best)
        logger.info("saved %s", folder)
