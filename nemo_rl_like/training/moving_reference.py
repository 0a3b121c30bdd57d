"""A reference that moves: its weights go towards the policy's, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_like.cluster.context import Hosted
from nemo_rl_like.policy.client import Policy

SERVICE = "mixer"
MIXER = "nemo_rl_like.policy.mixer:ReferenceMixer"


@dataclass(frozen=True, slots=True)
class MovingReference:
    """What mixes the weights of two models on the same ranks."""

    policy: Policy
    reference: Policy

    @classmethod
    def start(cls, policy: Policy, reference: Policy) -> MovingReference:
        """Host it beside both."""
        models = {"policy": Hosted(policy.service, "model"), "reference": Hosted(reference.service, "model")}
        policy.group.host(SERVICE, MIXER, models)
        return cls(policy, reference)

    def move(self, alpha: float) -> None:
        """reference = alpha policy + (1 - alpha) reference."""
        self.policy.group.call(SERVICE, "mix", alpha, what="moving the reference")
