"""`BaseRank`: a policy's rank without its adapters, as the reference of a run that trains adapters."""

from __future__ import annotations

import ray

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.policy.gap import GapLimit
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.tokens.batch import TokenBatch


class BaseRank:
    """Answers as the model that the adapters started from. A worker's services run one after another, so nothing else sees it so."""

    def __init__(self, context: RankContext, *, policy: PolicyRank) -> None:
        self._policy = policy

    def logprobs(
        self, batch: TokenBatch, temperature: float, gap: GapLimit | None = None
    ) -> tuple[ray.ObjectRef, dict[str, float]]:
        """As `PolicyRank.logprobs`."""
        with self._policy.backend.without_adapters():
            return self._policy.logprobs(batch, temperature, gap)
