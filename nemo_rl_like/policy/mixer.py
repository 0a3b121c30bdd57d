"""`ReferenceMixer`: moves another model's weights towards the policy's, on the ranks that hold both."""

from __future__ import annotations

import torch

from nemo_rl_like.cluster.context import RankContext


class ReferenceMixer:
    """Both models have one layout, so every rank mixes what it holds and none need talk."""

    def __init__(self, context: RankContext, *, policy: torch.nn.Module, reference: torch.nn.Module) -> None:
        self._policy, self._reference = policy, reference

    @torch.no_grad()
    def mix(self, alpha: float) -> None:
        """reference = alpha policy + (1 - alpha) reference, in float32. Gorbatovski et al. 2024 (arXiv 2404.09656)."""
        for mine, theirs in zip(self._policy.parameters(), self._reference.parameters(), strict=True):
            theirs.copy_(torch.lerp(theirs.float(), mine.float(), alpha))
