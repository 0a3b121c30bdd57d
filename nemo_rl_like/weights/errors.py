"""The error of a weight sync that did not deliver what was sent."""

from __future__ import annotations

from nemo_rl_like.artifacts.errors import NrlError


class WeightSyncError(NrlError):
    """An engine does not hold the trainer's weights; the message names the tensors or the numbers that show it."""
