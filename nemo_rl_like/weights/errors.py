"""The error of a weight sync that did not deliver what was sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl_like.artifacts.errors import NrlError


class WeightSyncError(NrlError):
    """An engine does not hold the trainer's weights; the message names the tensors or the numbers that show it."""


@contextmanager
def told_of(receiver: str) -> Iterator[None]:
    """Name the receiver, for example `engine replica 1`, in a WeightSyncError of the block."""
    try:
        yield
    except WeightSyncError as error:
        raise WeightSyncError(f"{receiver}: {error}") from error
