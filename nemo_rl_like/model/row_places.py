"""Which tokens of a pass belong to which of its rows, for losses that are means over rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """K pairs of a row and one of its tokens in a pass. A shared prompt's tokens are in a pair with each of its rows."""

    places: Tensor
    """int64 [K] flat place (of b * s, row-major) of the token."""
    rows: Tensor
    """int64 [K] row, counted within the pass."""
    lengths: Tensor
    """int64 [R] tokens of each row."""

    def to(self, device: torch.device) -> RowPlaces:
        """The same pairs on `device`."""
        return RowPlaces(self.places.to(device), self.rows.to(device), self.lengths.to(device))

    def on_rank(self, shape: torch.Size, padded: int, parts: int, part: int) -> RowPairs:
        """The pairs whose token is on a rank that has part `part` of `parts` of the sequence; tokens there lie [s / parts, b].

        `shape` [b, s] of the pass, whose rows are `padded` places long in the model.
        """
        rows, length = shape
        own = padded // parts
        column = self.places % length - own * part
        mine = (column >= 0) & (column < own)
        tokens = column * rows + self.places // length
        return RowPairs(tokens[mine], self.rows[mine], self.lengths[:, None].float(), in_parts=parts > 1)


@dataclass(frozen=True, slots=True)
class RowPairs:
    """The pairs of a row and one of this rank's tokens."""

    tokens: Tensor
    """int64 [K] token of this rank."""
    rows: Tensor
    """int64 [K]"""
    lengths: Tensor
    """float32 [R, 1] tokens of each row over all ranks."""
    in_parts: bool
    """Other ranks have further tokens of the rows."""

    def sums(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens [n, C], summed over each row: [R, C]."""
        zeros = values.new_zeros(self.lengths.shape[0], values.shape[1])
        return zeros.index_add(0, self.rows, values.index_select(0, self.tokens))
