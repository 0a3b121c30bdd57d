"""Corrections of the mismatch between engine and trainer. Equations and papers stand in `algorithms/`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from nemo_rl_like.spec.base import Spec


class TisCorrection(Spec):
    """Weight of each token: exp(proximal - behavior), truncated."""

    kind: Literal["tis"] = "tis"
    """Correction."""
    cap: PositiveFloat = 2.0
    """Largest weight (5 is usual for asynchronous training)."""


class IcePopCorrection(Spec):
    """Weight of each token: exp(proximal - behavior) inside a band, 0 outside."""

    kind: Literal["icepop"] = "icepop"
    """Correction."""
    low: NonNegativeFloat = 0.5
    """Smallest weight that counts."""
    high: PositiveFloat = 5.0
    """Largest weight that counts."""


class SequenceTisCorrection(Spec):
    """Weight of each sequence: the product of its tokens' weights, truncated."""

    kind: Literal["sequence_tis"] = "sequence_tis"
    """Correction."""
    cap: PositiveFloat = 2.0
    """Largest weight."""


class SequenceMaskCorrection(Spec):
    """Drops a sequence whose product of weights lies outside a band."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    """Correction."""
    low: NonNegativeFloat = 0.5
    """Smallest product that is kept."""
    high: PositiveFloat = 2.0
    """Largest product that is kept."""


class GeometricMaskCorrection(Spec):
    """Drops a sequence whose geometric mean of weights lies outside a band."""

    kind: Literal["geometric_mask"] = "geometric_mask"
    """Correction."""
    low: NonNegativeFloat = 0.99
    """Smallest mean that is kept."""
    high: PositiveFloat = 1.01
    """Largest mean that is kept."""


class OffPolicyMaskCorrection(Spec):
    """Drops a sequence of negative advantage from which the policy has moved away."""

    kind: Literal["off_policy_mask"] = "off_policy_mask"
    """Correction."""
    delta: NonNegativeFloat = 0.1
    """Largest mean of behavior - current log-probs that is kept, in nats."""


CorrectionSpec = Annotated[
    TisCorrection
    | IcePopCorrection
    | SequenceTisCorrection
    | SequenceMaskCorrection
    | GeometricMaskCorrection
    | OffPolicyMaskCorrection,
    Field(discriminator="kind"),
]


CORRECTION_WEIGHTS = ("tis", "icepop", "sequence_tis")
"""Corrections that weigh; there can be only one. The others mask, and compose."""
