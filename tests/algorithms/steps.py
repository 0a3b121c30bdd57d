"""Random steps of a few samples for the oracle, and the same steps as token batches for the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows

from .oracle.samples import Sample, Tok

PROMPT = 2
GROUPS = (4, 3, 2, 1, 2)
"""Samples a group: sizes differ, and one is alone."""


def rounded(x: float) -> float:
    """`x` as float32 holds it, so that both sides read the same number."""
    return float(torch.tensor(x, dtype=torch.float32))


def random_step(seed: int, *, spread: float = 0.4, maximum: int = 7) -> list[Sample]:
    """Groups of different sizes: one of a single sample, one without spread, one with an invalid sample, some cut, some of two turns."""
    draw = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for group, size in enumerate(GROUPS):
        for member in range(size):
            invalid = (group, member) == (1, 1)
            flat = group == 2
            samples.append(_sample(draw, group, invalid=invalid, flat=flat, spread=spread, maximum=maximum))
    return samples


def _sample(draw: torch.Generator, group: int, *, invalid: bool, flat: bool, spread: float, maximum: int) -> Sample:
    def number(scale: float = 1.0, shift: float = 0.0) -> float:
        return rounded(float(torch.randn((), generator=draw)) * scale + shift)

    def uniform() -> float:
        return rounded(float(torch.rand((), generator=draw)))

    length = 2 + int(uniform() * (maximum - 1))
    reward = 0.5 if flat else rounded(math.floor(uniform() * 4) / 4)
    split = length // 2 if uniform() < 0.5 else length
    turns = [0 if t < split else 1 for t in range(length)]
    states = [group * 10, group * 10 + int(uniform() * 2)]
    tokens = []
    for t in range(length):
        behavior = number(0.5, -1.5)
        proximal = rounded(behavior + number(spread / 2))
        tokens.append(
            Tok(
                trained=not invalid and (uniform() < 0.8 or t == 0),
                behavior=behavior,
                proximal=proximal,
                reference=rounded(proximal + number(spread)),
                teacher=rounded(proximal + number(spread)),
                value=number(0.5, 0.3),
                reward=0.0,
                entropy=rounded(0.1 + uniform()),
                draw=uniform(),
                turn=turns[t],
                anchor=states[turns[t]],
            )
        )
    if turns[-1] == 1 and not invalid:
        tokens = _with_turn_rewards(tokens, reward, rounded(math.floor(uniform() * 4) / 4))
    return Sample(
        group=group,
        valid=not invalid,
        reward=math.nan if invalid else reward,
        parts={"correct": math.nan if invalid else reward, "format": math.nan if invalid else rounded(uniform())},
        greedy=rounded(0.25 * group),
        opponent=rounded(0.25 * (split % 4)),
        truncated=uniform() < 0.3,
        bootstrap=number(0.5, 0.3),
        limit=maximum,
        tokens=tokens,
    )


def _with_turn_rewards(tokens: list[Tok], reward: float, first: float) -> list[Tok]:
    """A part of the reward on the last trained token of the first turn, the rest on the last one."""
    out = list(tokens)
    trained = [t for t, tok in enumerate(tokens) if tok.trained]
    early = [t for t in trained if tokens[t].turn == 0]
    if early[-1] != trained[-1]:
        out[early[-1]] = replace(out[early[-1]], reward=first)
        out[trained[-1]] = replace(out[trained[-1]], reward=rounded(reward - first))
    return out


def to_batch(samples: Sequence[Sample], *, two_rows: bool = False) -> tuple[TokenBatch, list[list[int]]]:
    """The step as a batch, and the place of each sample's tokens in it. `two_rows`: a second turn has a row of its own.

    Samples of a group have the same prompt; every token id is drawn from its place, so that rows can share it.
    """
    rows: list[Row] = []
    owners: list[list[tuple[int, int]]] = []
    for i, sample in enumerate(samples):
        parts = _segments(sample, two_rows)
        for part in parts:
            rows.append(_row(i, sample, part, prompt_id=sample.group if len(parts) == 1 else 100 + len(rows)))
            owners.append([(i, t) for t in part])
    batch = batch_rows(rows)
    places: list[list[int]] = [[0] * len(sample.tokens) for sample in samples]
    for start, owned in zip(batch.cu_seqlens.tolist(), owners, strict=False):
        for offset, (i, t) in enumerate(owned):
            places[i][t] = start + PROMPT + offset
    return batch, places


def _segments(sample: Sample, two_rows: bool) -> list[list[int]]:
    everything = list(range(len(sample.tokens)))
    second = [t for t in everything if sample.tokens[t].turn == 1]
    if not (two_rows and second):
        return [everything]
    return [[t for t in everything if sample.tokens[t].turn == 0], second]


def _row(episode: int, sample: Sample, part: Sequence[int], prompt_id: int) -> Row:
    toks = [sample.tokens[t] for t in part]
    n = len(toks)

    def over(values: Sequence[float]) -> list[float]:
        return [0.0] * PROMPT + list(values)

    return Row(
        tokens=[1 + prompt_id, 2, *(3 + t for t in range(n))],
        prompt_len=PROMPT,
        loss_mask=[False] * PROMPT + [tok.trained for tok in toks],
        behavior=over([tok.behavior for tok in toks]),
        version=[-1] * PROMPT + [0] * n,
        prompt_id=prompt_id,
        group_id=sample.group,
        episode_id=episode,
        valid=sample.valid,
        rewards={"reward": sample.reward, **sample.parts},
        columns={
            "truncated": float(sample.truncated),
            "greedy": sample.greedy,
            "opponent": sample.opponent,
            "last_values": sample.bootstrap,
        },
        extras={
            "proximal": over([tok.proximal for tok in toks]),
            "reference": over([tok.reference for tok in toks]),
            "teacher": over([tok.teacher for tok in toks]),
            "values": over([tok.value for tok in toks]),
            "turn_rewards": over([tok.reward for tok in toks]),
            "turn": over([float(tok.turn) for tok in toks]),
            "anchor": over([float(tok.anchor) for tok in toks]),
            "draws": over([tok.draw for tok in toks]),
            "entropy": over([tok.entropy for tok in toks]),
        },
    )


def random_current(seed: int, samples: Sequence[Sample], spread: float = 0.4) -> list[list[float]]:
    """Current log-probs near the proximal ones, as float32 holds them."""
    draw = torch.Generator().manual_seed(1000 + seed)
    return [
        [rounded(tok.proximal + float(torch.randn((), generator=draw)) * spread) for tok in s.tokens] for s in samples
    ]


def on_batch(batch: TokenBatch, places: Sequence[Sequence[int]], values: Sequence[Sequence[float]]) -> Tensor:
    """float64 [N]: each sample's values at its places."""
    out = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    for at, row in zip(places, values, strict=True):
        out[torch.tensor(at)] = torch.tensor(row, dtype=torch.float64)
    return out
