"""The preference stage: losses on pairs or on judged completions, each a block with a `kind`, and what they have in common.

Equations and papers stand with the functions in `algorithms/preference_losses.py`, under the same names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec
from nemo_rl_like.spec.stage import CheckpointSpec, PresetStage

NoiseRate = Annotated[float, Field(ge=0, lt=0.5)]


# -- losses; pi and ref are a completion's summed log-probs, u = pi - ref, h = u of the chosen - u of the rejected one


class PreferenceLoss(Spec):
    """What every loss has."""

    weight: PositiveFloat = 1.0
    """Weight of this loss in the sum."""


class DpoLoss(PreferenceLoss):
    """-log sigmoid(beta h): direct preference optimisation."""

    kind: Literal["dpo"] = "dpo"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference; the reward of a completion is beta u."""
    label_smoothing: NoiseRate = 0.0
    """Share of pairs that are taken to be the wrong way round (conservative DPO)."""
    offset: NonNegativeFloat = 0.0
    """Weight of the pair's `margin`, by which the rewards must differ at least (DPO with an offset); needs rows with a margin."""


class RobustLoss(PreferenceLoss):
    """DPO whose expectation is that of clean labels when a share of them is flipped."""

    kind: Literal["robust"] = "robust"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""
    label_smoothing: NoiseRate = 0.1
    """Share of pairs that are the wrong way round."""


class IpoLoss(PreferenceLoss):
    """(h - 1 / (2 beta))^2."""

    kind: Literal["ipo"] = "ipo"
    """Loss."""
    beta: PositiveFloat = 0.1
    """The target of h is 1 / (2 beta)."""
    logp_reduction: Literal["mean", "sum"] = "mean"
    """A completion's log-prob: the mean over its tokens, as its authors do it, or their sum."""


class HingeLoss(PreferenceLoss):
    """max(0, 1 - beta h) (SLiC)."""

    kind: Literal["hinge"] = "hinge"
    """Loss."""
    beta: PositiveFloat = 0.1
    """h must reach 1 / beta."""


class ExoLoss(PreferenceLoss):
    """Reverse KL from the labels' distribution to sigmoid(beta h)."""

    kind: Literal["exo"] = "exo"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""
    label_smoothing: NoiseRate = 1e-3
    """Probability that the labels give the rejected completion; above 0."""

    @model_validator(mode="after")
    def _has_a_finite_target(self) -> ExoLoss:
        if self.label_smoothing == 0:
            raise ValueError(
                "`label_smoothing` is 0.0, must be above 0 for exo, whose loss is infinite at 0; use 0.001, or `dpo`"
            )
        return self


class DiscopopLoss(PreferenceLoss):
    """A blend of logistic and exponential loss of beta h."""

    kind: Literal["discopop"] = "discopop"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""
    tau: PositiveFloat = 0.05
    """Width of the blend, in beta h."""


class SppoLoss(PreferenceLoss):
    """(u_c - 1 / (2 beta))^2 + (u_r + 1 / (2 beta))^2."""

    kind: Literal["sppo"] = "sppo"
    """Loss."""
    beta: PositiveFloat = 0.1
    """The targets of the log-ratios are +-1 / (2 beta)."""


class NcaLoss(PreferenceLoss):
    """Noise contrastive alignment: each log-ratio against 0, so that the chosen one does not fall."""

    kind: Literal["nca"] = "nca"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""


class BcoLoss(PreferenceLoss):
    """Binary classification of each completion's reward against the running mean reward."""

    kind: Literal["bco"] = "bco"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""


class ApoZeroLoss(PreferenceLoss):
    """Raises the chosen and lowers the rejected completion; for chosen ones that are better than the model."""

    kind: Literal["apo_zero"] = "apo_zero"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""


class ApoDownLoss(PreferenceLoss):
    """Lowers both completions, the rejected one more; for chosen ones that are worse than the model."""

    kind: Literal["apo_down"] = "apo_down"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""


class SimpoLoss(PreferenceLoss):
    """-log sigmoid(beta (difference of the mean log-probs) - gamma); no reference."""

    kind: Literal["simpo"] = "simpo"
    """Loss."""
    beta: PositiveFloat = 2.0
    """Scale of the mean log-probs."""
    gamma: NonNegativeFloat = 1.0
    """Margin between the two."""


class CpoLoss(PreferenceLoss):
    """-log sigmoid(beta (pi_c - pi_r)) + alpha times the chosen completion's negative log-likelihood; no reference."""

    kind: Literal["cpo"] = "cpo"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Scale of the summed log-probs."""
    alpha: NonNegativeFloat = 1.0
    """Weight of the summed negative log-likelihood."""


class OrpoLoss(PreferenceLoss):
    """Negative log-likelihood of the chosen completion, and the odds ratio of the two; no reference."""

    kind: Literal["orpo"] = "orpo"
    """Loss."""
    lam: PositiveFloat = 0.1
    """Weight of the odds ratio (lambda in the paper, beta in TRL)."""


class KtoLoss(PreferenceLoss):
    """Each completion is desirable or not, compared with the policy's mean log-ratio on mismatched completions; no pairs."""

    kind: Literal["kto"] = "kto"
    """Loss."""
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable completions; weight times number is usually 1 to 4/3 times that of the undesirable ones."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable completions."""


DIFFERENCE_LOSSES = ("dpo", "robust", "ipo", "hinge", "exo", "discopop")
"""Losses of h alone: an f-divergence takes the place of the reverse KL in them."""
REFERENCE_FREE_LOSSES = ("simpo", "cpo", "orpo")
"""Losses that load no reference model."""
PreferenceLossSpec = Annotated[
    DpoLoss
    | RobustLoss
    | IpoLoss
    | HingeLoss
    | ExoLoss
    | DiscopopLoss
    | SppoLoss
    | NcaLoss
    | BcoLoss
    | ApoZeroLoss
    | ApoDownLoss
    | SimpoLoss
    | CpoLoss
    | OrpoLoss
    | KtoLoss,
    Field(discriminator="kind"),
]


# -- the divergence from the reference that the implied reward pays for


class ReverseKl(Spec):
    """KL(policy || reference): a completion's score is u."""

    kind: Literal["reverse_kl"] = "reverse_kl"
    """Divergence."""


class ForwardKl(Spec):
    """KL(reference || policy): the score is -exp(-u)."""

    kind: Literal["forward_kl"] = "forward_kl"
    """Divergence."""


class JensenShannon(Spec):
    """Jensen-Shannon: the score is log sigmoid(u)."""

    kind: Literal["js"] = "js"
    """Divergence."""


class AlphaDivergence(Spec):
    """Alpha divergence: the score is -exp(-alpha u) / alpha, between reverse KL (to 0) and forward KL (1)."""

    kind: Literal["alpha"] = "alpha"
    """Divergence."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The exponent; 1 - alpha is TRL's coefficient."""


FDivergenceSpec = Annotated[ReverseKl | ForwardKl | JensenShannon | AlphaDivergence, Field(discriminator="kind")]


class PreferenceSpec(Spec):
    """What is minimised: a weighted sum of losses, and options that change all of them."""

    losses: Annotated[tuple[PreferenceLossSpec, ...], Field(min_length=1)] = (DpoLoss(),)
    """Losses of a pair (or `kto` alone, on judged completions); their weighted sum is minimised."""
    f_divergence: FDivergenceSpec = ReverseKl()
    """Divergence from the reference."""
    rpo_alpha: NonNegativeFloat = 0.0
    """Weight of the chosen completion's negative log-likelihood, a mean over its tokens (RPO)."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of the tokens behind the shorter completion's length in the log-ratios (LD-DPO); default: 1, all count alike."""
    wpo: bool = False
    """Weigh each pair by how likely the policy is to write it itself (WPO)."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the losses, in order."""
        return tuple(loss.kind for loss in self.losses)

    @property
    def unpaired(self) -> bool:
        """Whether completions are judged one by one."""
        return self.kinds == ("kto",)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is loaded."""
        return not set(self.kinds) <= set(REFERENCE_FREE_LOSSES)

    @property
    def measured(self) -> PreferenceLossSpec:
        """The loss whose rewards are reported: the first one with a reference, else the first."""
        with_reference = [loss for loss in self.losses if loss.kind not in REFERENCE_FREE_LOSSES]
        return (*with_reference, *self.losses)[0]

    @property
    def needs_margin(self) -> bool:
        """Whether rows must have a margin."""
        return any(isinstance(loss, DpoLoss) and loss.offset > 0 for loss in self.losses)

    @model_validator(mode="after")
    def _losses_fit(self) -> PreferenceSpec:
        self._check_kto()
        self._check_divergence()
        free = [kind for kind in self.kinds if kind in REFERENCE_FREE_LOSSES]
        if self.ld_alpha is not None and free:
            raise ValueError(
                f"`ld_alpha` is {self.ld_alpha} and changes log-ratios to the reference, which {free[0]} has not; leave it out, or "
                "use a loss with a reference (`dpo`)"
            )
        return self

    def _check_kto(self) -> None:
        if "kto" not in self.kinds:
            return
        if len(self.losses) > 1:
            others = ", ".join(kind for kind in self.kinds if kind != "kto") or "kto again"
            raise ValueError(
                f"`losses` has kto, which judges single completions, and {others}; keep kto alone, or losses of pairs alone"
            )
        given = {"rpo_alpha": self.rpo_alpha or None, "ld_alpha": self.ld_alpha, "wpo": self.wpo or None}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"`{name}` is {value} and needs pairs, but `losses` is kto; leave it out")

    def _check_divergence(self) -> None:
        if self.f_divergence.kind == "reverse_kl":
            return
        for kind in self.kinds:
            if kind not in DIFFERENCE_LOSSES:
                why = "has no reference" if kind in REFERENCE_FREE_LOSSES else "is no function of h alone"
                raise ValueError(
                    f"`f_divergence` is {self.f_divergence.kind}, but {kind} {why}; use `reverse_kl`, or losses among "
                    f"{', '.join(DIFFERENCE_LOSSES)}"
                )


# -- the stage


class PreferenceDataSpec(Spec):
    """Preference data: a file of pairs, or of judged completions."""

    path: str
    """JSONL file. Pairs: {"prompt", "chosen", "rejected", "margin"?}, texts or messages, or whole conversations without a `prompt`;
    kto: {"prompt", "completion", "label": true or false}."""
    unpair: bool = False
    """For kto: make two judged completions of each pair."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What is longer than the context is dropped and counted, or stops the run."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the prompts held out for validation."""


class ReferenceSyncSpec(Spec):
    """Moves the reference towards the policy (TR-DPO)."""

    every_steps: PositiveInt = 512
    """Optimizer steps between two moves."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the policy in the new reference; 1 = a copy."""


class PreferenceStageSpec(PresetStage, PreferenceSpec):
    """Preference optimisation on pairs or judged completions from a file."""

    kind: Literal["preference"] = "preference"
    """Stage kind."""
    data: PreferenceDataSpec
    """Training data."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    pairs_per_step: PositiveInt = 32
    """Pairs (kto: judged completions) in one optimizer step."""
    optimizer: OptimizerSpec = AdamWOptimizer(lr=1e-6)
    """Optimizer and schedule."""
    reference_sync: ReferenceSyncSpec | None = None
    """Move the reference; default: it stays the model that the stage started from."""
    validate_every_steps: NonNegativeInt = 0
    """Validation loss and accuracy every this many steps; 0 = never."""
    validation_pairs: PositiveInt = 256
    """Pairs (kto: judged completions) of one validation."""
    checkpoint: CheckpointSpec = CheckpointSpec(best_metric="validation/rewards/margins")
    """Checkpoints of this stage."""
    init_from: str | None = None
    """Stage whose checkpoint this one starts from; default: the stage before it that makes one, or the model."""

    @model_validator(mode="after")
    def _stage_fits(self) -> PreferenceStageSpec:
        self.optimizer.check_updates(self.steps)
        if self.unpaired and self.pairs_per_step < 2:
            raise ValueError(
                f"`pairs_per_step` is {self.pairs_per_step}, but kto compares a completion with those of other prompts and needs at "
                "least 2 (32 is usual)"
            )
        if self.unpaired and self.validate_every_steps and self.validation_pairs < 2:
            raise ValueError(f"`validation_pairs` is {self.validation_pairs}, kto needs at least 2 (256 is usual)")
        if self.validate_every_steps and not self.data.validation_fraction:
            raise ValueError(
                f"`validate_every_steps` is {self.validate_every_steps}, but `data.validation_fraction` is 0.0 and holds nothing out; "
                "set it above 0 (0.1 is usual), or leave `validate_every_steps` out"
            )
        if self.data.unpair and not self.unpaired:
            raise ValueError(
                f"`data.unpair` is true, but {', '.join(self.kinds)} needs pairs; leave it out, or use `losses: [kto]`"
            )
        if self.reference_sync is not None and not self.needs_reference:
            raise ValueError(
                f"`reference_sync` moves a reference, and {', '.join(self.kinds)} has none; leave it out, or use `losses: [dpo]`"
            )
        return self
