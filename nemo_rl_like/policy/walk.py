"""One walk over a batch's rows: what is asked, what is found, and what the output head says of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.algorithms.objectives import Objective, Outputs, StepStats
from nemo_rl_like.model.heads import OutputHead, token_logprobs
from nemo_rl_like.tokens.batch import TokenBatch


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk over a batch's rows: at which temperature, and which loss (None: log-probs only)."""

    temperature: float
    objective: Objective | None = None
    stats: StepStats | None = None
    keep_entropy: bool = False
    """Return the entropy of every scored token too."""
    scale: float = 1.0
    """Multiplies the loss, not the metrics."""
    finalize: bool = True
    """Sum the gradients over ranks at the end; False: another walk of the same step follows and does it."""

    @property
    def with_entropy(self) -> bool:
        """Whether entropy is computed beside log-probs."""
        return self.keep_entropy or (self.objective is not None and self.objective.needs_entropy)

    @property
    def with_collision(self) -> bool:
        """Whether the log of the sum of squared probabilities is computed beside log-probs."""
        return self.objective is not None and self.objective.needs_collision

    @property
    def with_log_norm(self) -> bool:
        """Whether the log-normaliser is computed beside log-probs."""
        return self.objective is not None and self.objective.needs_log_norm

    def together(self, batch: TokenBatch) -> Tensor | None:
        """int64 [B]: rows of equal numbers are in the same pass."""
        return None if self.objective is None else self.objective.together(batch)


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk found, equal on every rank."""

    logprobs: Tensor
    """float32 [N] log-probs, of a model with a score head the scores; 0 where not scored."""
    entropy: Tensor
    """float32 [N] if it was to be kept, else empty."""
    sums: Tensor
    """Sums of the objective's metrics."""
    passes: Mapping[str, float]
    """How the rows were laid out, see `Passes.metrics`."""


def head_outputs(
    hidden: Tensor, head: OutputHead, targets: Tensor, walk: Walk, candidates: Tensor | None, chunk_tokens: int
) -> Outputs:
    """What the head says of `targets` [M] after `hidden` [M, H], and of further `candidates` [M, K] in their places."""
    if candidates is not None:
        targets = torch.cat([targets[:, None], candidates.long()], dim=1)
    out = token_logprobs(
        hidden,
        head,
        targets,
        temperature=walk.temperature,
        chunk_tokens=chunk_tokens,
        want_entropy=walk.with_entropy,
        want_collision=walk.with_collision,
        want_log_norm=walk.with_log_norm,
    )
    if candidates is None:
        return Outputs(out.logprobs, out.entropy, out.collision, log_norm=out.log_norm)
    return Outputs(out.logprobs[:, 0], out.entropy, out.collision, out.logprobs[:, 1:], out.log_norm)
