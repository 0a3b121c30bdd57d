"""What the oracle reads: one step's samples, each with its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tok:
    """A token and what is known about it; log-probs in nats."""

    trained: bool
    """The policy sampled it and it is trained (m[i,t] of numerics section 0)."""
    behavior: float
    """Log-prob by the engine."""
    proximal: float
    """Log-prob by the trainer before the step's first update."""
    reference: float
    """Log-prob by the frozen model."""
    teacher: float
    """Log-prob by the teacher."""
    value: float
    """The critic's value at the position that predicts this token."""
    reward: float
    """The turn's reward if it falls on this token, else 0."""
    entropy: float
    """Entropy of the distribution it was drawn from, in nats."""
    draw: float
    """A fixed random number in [0, 1)."""
    turn: int
    """Number of its turn."""
    anchor: int
    """Number of the state its turn starts from."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled episode of a prompt (its group)."""

    group: int
    valid: bool
    """False: could not be scored. Such a sample has no trained token and enters no count."""
    reward: float
    """Total reward, before shaping; NaN if invalid."""
    parts: dict[str, float]
    """The rewards it is made of, by name."""
    greedy: float
    """Reward of the prompt's greedy answer."""
    truncated: bool
    """Cut at the token limit."""
    bootstrap: float
    """The critic's value after the last trained token."""
    limit: int
    """Most tokens that could be sampled."""
    tokens: list[Tok]
    opponent: float = 0.0
    """Reward of the opponent's answer to the prompt."""


def trained(sample: Sample) -> list[int]:
    """Positions of the sample's trained tokens; their number is T_i."""
    if not sample.valid:
        return []
    return [t for t, tok in enumerate(sample.tokens) if tok.trained]


def trained_tokens(sample: Sample) -> list[Tok]:
    """The sample's trained tokens, in order."""
    return [sample.tokens[t] for t in trained(sample)]


def valid_groups(samples: list[Sample]) -> dict[int, list[int]]:
    """Indices of the valid samples of every group that has one."""
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        if sample.valid:
            groups.setdefault(sample.group, []).append(i)
    return groups
