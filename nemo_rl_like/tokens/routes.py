"""`TokenRoutes`: the experts that an engine sent the tokens of a row to, in 2 bytes for each layer with experts and expert of a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUTES = "routes"
"""Name under which a `TokenBatch` has them: int16 [N, layers with experts * k], each expert's number and one; 0 where none was recorded."""
_ITEM = 2


@dataclass(frozen=True, slots=True)
class TokenRoutes:
    """Those of neighbouring tokens, as bytes that travel with them from process to process."""

    width: int
    """Numbers of a token: the model's layers with experts, times the experts that a token passes."""
    data: bytes
    """int16, token after token; see `ROUTES`."""

    @classmethod
    def none(cls, width: int, tokens: int) -> TokenRoutes:
        """Of tokens without a record."""
        return cls(width, bytes(_ITEM * width * tokens))

    @classmethod
    def of(cls, record: Tensor) -> TokenRoutes:
        """Of int16 [n, width]."""
        return cls(record.shape[1], record.contiguous().cpu().numpy().tobytes())

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return len(self.data) // (_ITEM * self.width)

    def __add__(self, other: TokenRoutes) -> TokenRoutes:
        """Those of the tokens of both, one behind the other. Raises ValueError for records of different widths."""
        if self.width != other.width:
            raise ValueError(f"records of {self.width} and of {other.width} numbers a token are of different models")
        return TokenRoutes(self.width, self.data + other.data)

    def first(self, tokens: int) -> TokenRoutes:
        """Those of the first tokens."""
        return TokenRoutes(self.width, self.data[: _ITEM * self.width * tokens])

    def padded(self, tokens: int) -> TokenRoutes:
        """Those of so many tokens, of which the last may have no record."""
        return self + TokenRoutes.none(self.width, tokens - self.tokens)

    def completed(self, later: TokenRoutes) -> TokenRoutes:
        """A later record of these tokens and more, but where one of them had a record already, that one."""
        step, data = _ITEM * self.width, bytearray(later.data)
        for start in range(0, len(self.data), step):
            own = self.data[start : start + step]
            if any(own):
                data[start : start + step] = own
        return TokenRoutes(self.width, bytes(data))

    def tensor(self) -> Tensor:
        """int16 [n, width]."""
        if not self.data:
            return torch.zeros(0, self.width, dtype=torch.int16)
        return torch.frombuffer(bytearray(self.data), dtype=torch.int16).view(-1, self.width)
