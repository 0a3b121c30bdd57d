"""Router replay: the experts that each token was sent to in one pass, or by an engine, for later passes over the same rows (arXiv 2507.18071,
sec. 5.3; arXiv 2510.11370). See `tokens.routes.ROUTES`.

After an update a router may choose other experts, and then the log-prob of a token changes by more than its weights did. Tokens are known by
their places in the flat batch, so that passes may be laid out in another way; a prompt's token has the same experts in each of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.row_places import RowPairs


class Routes:
    """What is recorded, or replayed, while a walk lasts."""

    def __init__(self, layers: int, per_token: int) -> None:
        self._shape = (layers, per_token)
        self._record: Tensor | None = None
        self._replayed: Tensor | None = None
        self._taken: Tensor | None = None
        self._differs: Tensor | None = None

    @property
    def busy(self) -> bool:
        """Whether a router must say, or be told, what it chooses."""
        return self._record is not None or self._replayed is not None or self._taken is not None

    @contextmanager
    def taking(self, tokens: int, device: torch.device) -> Iterator[Tensor]:
        """Inside the block the choices of this rank's layers for a pass of so many tokens, which it has whole, go to the tensor
        [tokens, layers * k]."""
        taken = torch.zeros(tokens, *self._shape, dtype=torch.int16, device=device)
        self._taken = taken
        try:
            yield taken.view(tokens, -1)
        finally:
            self._taken = None

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
        self._differs = None if routes is None else torch.zeros(routes.shape[0], dtype=torch.uint8, device=device)
        try:
            yield
        finally:
            self._replayed = None

    def differing(self) -> Tensor:
        """float32 [1] share of the tokens of the last replay that were told other experts, in some layer, than their routers chose, of those
        that were told any in a pass: one all-reduce, the same on every rank."""
        found, self._differs = self._differs, None
        if found is None:
            return torch.zeros(1, device=runtime.device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        told = (found > 0).sum().clamp(min=1)
        return ((found > 1).sum() / told).float()[None]

    def choose(self, layer: int, rows: RowPairs | None, index: Tensor) -> Tensor:
        """The experts [n, k] that a layer's tokens go to, where its router chose `index`."""
        if self._taken is not None:
            self._taken[:, layer] = (index[: self._taken.shape[0]] + 1).short()
        if rows is None:
            return index
        if self._replayed is not None:
            index = self._told(layer, self._replayed, rows, index)
        if self._record is not None:
            self._record[rows.sources, layer] = (index[rows.tokens] + 1).short()
        return index

    def _told(self, layer: int, routes: Tensor, rows: RowPairs, index: Tensor) -> Tensor:
        """The experts [n, k] that tokens were told, or their routers' choice `index`; notes which differ."""
        of_rows = routes[rows.sources, layer].long()
        told = torch.zeros_like(index)
        told[rows.tokens] = of_rows
        if self._differs is not None:
            known = of_rows[:, 0] > 0
            other = (of_rows.sort(1).values != index[rows.tokens].sort(1).values + 1).any(1)
            mark = torch.where(known, 1 + other.to(torch.uint8), 0).to(torch.uint8)
            self._differs[rows.sources] = torch.maximum(self._differs[rows.sources], mark)
        return torch.where(told > 0, told - 1, index)
