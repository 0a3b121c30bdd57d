"""The reward of an environment of prompts alone: none, because a reward model judges what is answered."""

from __future__ import annotations

from collections.abc import Sequence


def reward_func(
    prompts: Sequence[str], responses: Sequence[str], labels: Sequence[object] | None = None
) -> list[float]:
    """0 for every response."""
    return [0.0] * len(responses)
