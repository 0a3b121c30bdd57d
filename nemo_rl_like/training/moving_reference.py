"""A model that moves: the weights of a reference, or of an average, go towards the policy's, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_like.cluster.context import Hosted
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.stage import EmaSpec

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


def follow(average: MovingReference | None, ema: EmaSpec | None) -> None:
    """After an optimizer step: average = decay average + (1 - decay) policy, where there is one."""
    if average is not None and ema is not None:
        average.move(1.0 - ema.decay)
