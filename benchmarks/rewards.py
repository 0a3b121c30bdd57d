"""Reward functions of the benchmarks, in the form that `environment.reward` takes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d+")


def first_integer(prompts: Sequence[str], responses: Sequence[str], labels: Sequence[str] | None = None) -> list[float]:
    """1 where a response's first whole number is its label, else 0."""
    if labels is None:
        raise ValueError("first_integer needs a label for each prompt")
    found = [_NUMBER.search(response) for response in responses]
    return [float(m is not None and m.group() == str(label)) for m, label in zip(found, labels, strict=True)]


def distinct(prompts: Sequence[str], responses: Sequence[str], labels: Sequence[str] | None = None) -> list[float]:
    """A number in [0, 1) drawn from each response's text: no two different responses have the same, so that every row trains."""
    digests = [hashlib.blake2b(response.encode(), digest_size=6).digest() for response in responses]
    return [int.from_bytes(digest, "big") / 2**48 for digest in digests]
