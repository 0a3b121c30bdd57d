"""`TeacherLogitsService`: conversations of a file as batches, shard by shard, and what teachers said of them onto disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.distill_rows import Conversation, load_conversations, own_rows
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.stored_logits import LogitsOrigin, Told, shard_path, write_logits, write_manifest
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows
from nemo_rl_like.training.distillation_service import total


class TeacherLogitsService:
    """Reads conversations in the order of the file and writes what teachers said; a shard that is there is not made again."""

    def __init__(
        self,
        context: RankContext | None,
        *,
        path: str,
        teachers: Mapping[str | None, int],
        origin: LogitsOrigin,
        folder: str,
        tokenizer_folder: str,
        examples_per_shard: int,
    ) -> None:
        """Read and check the data. Raises InputError."""
        self._renderer = Renderer.load(tokenizer_folder)
        self._origin, self._folder, self._size = origin, Path(folder), examples_per_shard
        dataset = load_conversations(path, teachers)
        self._source, self._examples = dataset.source, dataset.examples

    def missing(self) -> tuple[int, list[int]]:
        """How many shards there will be, and the numbers of those that are not there yet."""
        count = -(-len(self._examples) // self._size)
        return count, [n for n in range(count) if not (self._folder / shard_path(n)).is_file()]

    def batch(self, number: int) -> ray.ObjectRef | None:
        """The trained rows of a shard's conversations, or None where they have none."""
        rows = own_rows(self._of(number), self._renderer, max_tokens=self._origin.max_tokens).rows
        return ray.put(batch_rows(rows)) if rows else None

    def write(self, number: int, batch: TokenBatch, ids: Sequence[Tensor], logprobs: Sequence[Tensor]) -> int:
        """Write a shard of what teachers said, each of its own rows and 0 elsewhere; returns the tokens in it."""
        mask = batch.loss_mask
        told = Told(batch.tokens[mask].int(), total(ids)[mask], total(logprobs)[mask])
        of_row = torch.zeros(len(self._of(number)), dtype=torch.int64)
        write_logits(self._folder, number, told, of_row.index_add_(0, batch.group_id, batch.trained_per_row))
        return told.tokens.numel()

    def write_empty(self, number: int) -> None:
        """Write a shard whose conversations have no trained token, or are too long."""
        none = torch.zeros(0, self._origin.top_k)
        counts = torch.zeros(len(self._of(number)), dtype=torch.int64)
        write_logits(self._folder, number, Told(torch.zeros(0, dtype=torch.int32), none.int(), none), counts)

    def finish(self) -> None:
        """Write the manifest, when every shard is there."""
        count, _ = self.missing()
        write_manifest(self._folder, self._origin, count, self._size)

    def _of(self, number: int) -> Sequence[Conversation]:
        return self._examples[number * self._size : (number + 1) * self._size]


def check_conversations(path: str, teachers: Mapping[str | None, int]) -> None:
    """Open the data and see that there is a response to store. Raises InputError."""
    dataset = load_conversations(path, teachers)
    if not any(conversation.has_response for conversation in dataset.examples):
        raise InputError(
            f"{dataset.source}: no conversation has an assistant message; there is nothing to store log-probs of"
        )
