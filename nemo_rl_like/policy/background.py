"""Writes a rank's share of a checkpoint while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.tensors.packed import Packed
from nemo_rl_like.tensors.shards import ShardFile

Copies = Sequence[tuple[str, Sequence[Packed]]]
"""Sections with their tensors in host memory."""


class BackgroundSave:
    """Copies tensors to host memory, then writes the copies on a thread of its own. One save at a time.

    The memory, as much as a rank's share of a checkpoint has, is kept for the next save: new memory would take longer to get than to fill.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, tuple[str, ...]], Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "save")
        self._written: Future[tuple[ShardFile, ...]] | None = None

    def begin(
        self, sections: Iterable[tuple[str, Iterator[Packed]]], write: Callable[[Copies], tuple[ShardFile, ...]]
    ) -> None:
        """Copy the tensors of `sections`, which may change once this returns, and let `write` write the copies.

        Raises RuntimeError while an earlier save is still written.
        """
        if self._written is not None and not self._written.done():
            raise RuntimeError("a save is still being written; wait for `written` first")
        copies = [(section, [self._copied(section, share) for share in shares]) for section, shares in sections]
        if runtime.on_cuda():
            torch.cuda.synchronize()
        self._written = self._thread.submit(write, copies)

    def written(self) -> Future[tuple[ShardFile, ...]]:
        """The shards of the save that began last, once they are on the disk. Raises RuntimeError if none began."""
        if self._written is None:
            raise RuntimeError("no save has begun")
        return self._written

    def close(self) -> None:
        """Wait until what was begun is written."""
        self._thread.shutdown()

    def _copied(self, section: str, share: Packed) -> Packed:
        key, tensor = (section, share.names), share.tensor.detach()
        if key not in self._held:
            self._held[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return replace(share, tensor=self._held[key].copy_(tensor, non_blocking=True))
