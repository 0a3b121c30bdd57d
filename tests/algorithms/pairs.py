"""Random preference steps for the oracle, and the same steps as token batches for the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows

from .steps import PROMPT, rounded

PAIRS = 5


@dataclass(frozen=True)
class Side:
    """One completion: per-token numbers, of which the trained ones count."""

    trained: list[bool]
    current: list[float]
    reference: list[float]
    collision: list[float]

    def kept(self, values: Sequence[float]) -> list[float]:
        """Those of trained tokens."""
        return [x for x, m in zip(values, self.trained, strict=True) if m]


@dataclass(frozen=True)
class Step:
    """Completions and the same ones as a batch."""

    sides: list[Side]
    """Chosen and rejected ones of each pair in turn; for kto any completions, then their mismatched ones."""
    batch: TokenBatch
    places: list[list[int]]
    """Places of each completion's tokens in the batch."""

    def flat(self, values: Sequence[Sequence[float]]) -> Tensor:
        """float64 [N]: a number a token of the completions, at its place in the batch."""
        out = torch.zeros(self.batch.tokens.numel(), dtype=torch.float64)
        for at, row in zip(self.places, values, strict=True):
            out[torch.tensor(at)] = torch.tensor(row, dtype=torch.float64)
        return out

    @property
    def current(self) -> Tensor:
        """float64 [N]"""
        return self.flat([side.current for side in self.sides])


def random_sides(seed: int, count: int, spread: float = 0.4) -> list[Side]:
    """Completions of 1 to 7 tokens, some with a token inside that the environment wrote."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(n: int, scale: float, shift: float) -> list[float]:
        return [rounded(x) for x in (torch.randn(n, generator=draw) * scale + shift).tolist()]

    sides = []
    for i in range(count):
        n = 1 + int(torch.randint(0, 7, (), generator=draw))
        reference = numbers(n, 0.5, -1.5)
        current = [rounded(r + d) for r, d in zip(reference, numbers(n, spread, 0.0), strict=True)]
        trained = [not (i % 3 == 1 and t == n // 2 and n > 2) for t in range(n)]
        sides.append(Side(trained, current, reference, numbers(n, 0.3, -1.2)))
    return sides


def pair_step(seed: int, spread: float = 0.4) -> Step:
    """Pairs of one prompt each; two pairs have the same prompt."""
    sides = random_sides(seed, 2 * PAIRS, spread)
    rows = [
        _row(side, prompt=i // 2 % 4, group=i // 2, episode=i, chosen=float(i % 2 == 0), margin=rounded(0.1 * i))
        for i, side in enumerate(sides)
    ]
    return _step(sides, rows)


def judged_step(seed: int, count: int = 5, spread: float = 0.4) -> Step:
    """`count` completions with a judgement, then a mismatched one for each; with an odd seed the latter's mean log-ratio is above 0."""
    sides = random_sides(seed, 2 * count, spread)
    if seed % 2:
        risen = [replace(side, current=[rounded(x + 0.5) for x in side.current]) for side in sides[count:]]
        sides = sides[:count] + risen
    rows = [
        _row(side, prompt=i % count, group=i, episode=i, chosen=float(i % 3 != 1), mismatched=float(i >= count))
        for i, side in enumerate(sides)
    ]
    step = _step(sides, rows)
    looked = step.batch.with_extras(current=step.current.float(), entropy=torch.zeros(step.batch.tokens.numel()))
    return Step(step.sides, looked, step.places)


def _step(sides: list[Side], rows: list[Row]) -> Step:
    batch = batch_rows(rows)
    starts = (batch.cu_seqlens[:-1] + PROMPT).tolist()
    places = [[start + t for t in range(len(side.trained))] for start, side in zip(starts, sides, strict=True)]
    step = Step(sides, batch, places)
    reference = step.flat([side.reference for side in sides]).float()
    collision = step.flat([side.collision for side in sides]).float()
    return Step(sides, batch.with_extras(reference=reference, collision=collision), places)


def _row(side: Side, *, prompt: int, group: int, episode: int, **columns: float) -> Row:
    n = len(side.trained)
    return Row(
        tokens=[1 + prompt, 2, *(3 + t for t in range(n))],
        prompt_len=PROMPT,
        loss_mask=[False] * PROMPT + side.trained,
        behavior=[0.0] * (PROMPT + n),
        version=[-1] * (PROMPT + n),
        prompt_id=prompt,
        group_id=group,
        episode_id=episode,
        columns=columns,
    )
