"""The nearest valid word to a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` most likely meant: fewest edits, then longest common start; at most a third of its letters; None if none is close."""
    ranked: list[tuple[int, int, str]] = []
    for candidate in set(candidates):
        edits = distance(word.lower(), candidate.lower())
        if edits <= max(1, max(len(candidate), len(word)) // 3):
            ranked.append((edits, -_common_start(word, candidate), candidate))
    return min(ranked)[2] if ranked else None


def _common_start(a: str, b: str) -> int:
    """Letters that both words begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def distance(a: str, b: str) -> int:
    """Edits (insert, delete, replace, swap neighbours) that turn `a` into `b` (optimal string alignment)."""
    two_back: list[int] = []
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, two_back[j - 2] + 1)
            row.append(cost)
        two_back, previous = previous, row
    return previous[-1]
