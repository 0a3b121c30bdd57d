"""Seeds by hashing what they are for, so that a step that is run again draws the same samples."""

from __future__ import annotations

from nemo_rl_like.data.content_split import content_hash

_BITS = 63


def seed_of(*parts: str | int) -> int:
    """A seed in 0 .. 2^63 - 1, the same for the same parts on every machine."""
    return content_hash("seed", *parts) >> (64 - _BITS)


def sample_seed(purpose: str, run_seed: int, step: int, prompt: int, sample: int, turn: int) -> int:
    """Seed of the tokens of one turn. `purpose` keeps training and evaluation apart."""
    return seed_of("sample", purpose, run_seed, step, prompt, sample, turn)


def environment_seed(purpose: str, run_seed: int, step: int, prompt: int) -> int:
    """Seed of the environment; the samples of one prompt share it."""
    return seed_of("environment", purpose, run_seed, step, prompt)
