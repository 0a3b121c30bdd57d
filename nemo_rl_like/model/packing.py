"""Units of rows dealt to ranks and filled into passes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that go into one pass together."""

    rows: tuple[int, ...]
    tokens: int
    """Input tokens; under `padded`, the row's length."""


class Rooms:
    """Free tokens of passes in order, as a tree of maxima: finds the first pass with enough room in log(passes) steps."""

    def __init__(self, count: int, budget: int) -> None:
        self._budget = budget
        self._size = 1 << max(count - 1, 0).bit_length()
        self._most = [budget] * (2 * self._size)
        """Node i has the children 2i and 2i + 1; the leaves are the passes."""

    def take(self, tokens: int) -> int:
        """The first pass with room for `tokens`, which then has that much less; for more than the budget the first empty one."""
        asked, node = min(tokens, self._budget), 1
        while node < self._size:
            node = 2 * node if self._most[2 * node] >= asked else 2 * node + 1
        self._most[node] -= asked
        index = node - self._size
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
        return index


def merged(units: list[Unit], together: list[int]) -> list[Unit]:
    """Units that hold rows of the same number become one, in the order of their first ones."""
    owner: dict[int, int] = {}
    merged: dict[int, Unit] = {}
    for i, unit in enumerate(units):
        names = {together[row] for row in unit.rows}
        whole = unit
        for other in sorted({owner[name] for name in names if name in owner}):
            part = merged.pop(other)
            names |= {together[row] for row in part.rows}
            whole = Unit((*part.rows, *whole.rows), part.tokens + whole.tokens)
        merged[i] = whole
        owner.update(dict.fromkeys(names, i))
    return list(merged.values())


def deal(units: list[Unit], ranks: int, cost: Callable[[Unit], float]) -> tuple[list[list[Unit]], list[float]]:
    """Dearest unit first, each to the rank with the least to do so far; the units of each rank, and what they cost."""
    hands: list[list[Unit]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for price, unit in sorted(((cost(unit), unit) for unit in units), key=lambda priced: -priced[0]):
        so_far, rank = heapq.heappop(load)
        hands[rank].append(unit)
        heapq.heappush(load, (so_far + price, rank))
    return hands, [so_far for so_far, _ in load]
