"""Router replay: the experts that each token was sent to in one pass, for later passes over the same rows (arXiv 2507.18071, sec. 5.3).

After an update a router may choose other experts, and then the log-prob of a token changes by more than its weights did. Tokens are known by
their places in the flat batch, so that passes may be laid out in another way; a prompt's token has the same experts in each of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model.row_places import RowPairs

ROUTES = "routes"
"""Name under which a `TokenBatch` has them: int16 [N, layers with experts * k], each expert's number and one; 0 where none was recorded."""


class Routes:
    """What is recorded, or replayed, while a walk lasts."""

    def __init__(self, layers: int, per_token: int) -> None:
        self._shape = (layers, per_token)
        self._record: Tensor | None = None
        self._replayed: Tensor | None = None

    @property
    def busy(self) -> bool:
        """Whether a router must say, or be told, what it chooses."""
        return self._record is not None or self._replayed is not None

    @contextmanager
    def recording(self, tokens: int, device: torch.device) -> Iterator[Tensor]:
        """Inside the block the choices for a batch of so many tokens go to the tensor, [N, layers * k]; whole on every rank behind it."""
        record = torch.zeros(tokens, *self._shape, dtype=torch.int16, device=device)
        self._record = record
        try:
            yield record.view(tokens, -1)
        finally:
            self._record = None
        # Each entry is one rank's, and 0 on all others: the sum of bytes is that of numbers, and gloo and NCCL know no int16.
        dist.all_reduce(record.view(torch.uint8))

    @contextmanager
    def replaying(self, routes: Tensor | None, device: torch.device) -> Iterator[None]:
        """Inside the block routers choose as `routes` [N, layers * k] says; None: as they like."""
        self._replayed = None if routes is None else routes.to(device).view(routes.shape[0], *self._shape)
        try:
            yield
        finally:
            self._replayed = None

    def choose(self, layer: int, rows: RowPairs | None, index: Tensor) -> Tensor:
        """The experts [n, k] that a layer's tokens go to, where its router chose `index`."""
        if rows is None:
            return index
        if self._replayed is not None:
            told = torch.zeros_like(index)
            told[rows.tokens] = self._replayed[rows.sources, layer].long()
            index = torch.where(told > 0, told - 1, index)
        if self._record is not None:
            self._record[rows.sources, layer] = (index[rows.tokens] + 1).short()
        return index
