"""Optimizers with their schedules and groups of parameters. What each does to a weight stands in docs/optimizers.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec


class ParameterGroup(Spec):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Annotated[str, Field(min_length=1)]
    """Glob over Hugging Face names, for example `*.embed_tokens.weight` or `*norm.weight`; a parameter belongs to the first group that
    matches it."""
    lr_scale: NonNegativeFloat = 1.0
    """Times the learning rate that they would have; 0 holds them still."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay, also of norms and biases among them; default: what they would have without the group."""


class AdamMoments(Spec):
    """Adam's own numbers."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's moment decays."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""


class OptimizerBase(Spec):
    """What every optimizer has: a learning rate with its schedule, weight decay, clipping, groups."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the schedule."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warm-up; `wsd` holds, then falls linearly over the last `decay_fraction`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps over which the schedule falls to `min_lr`, where it then stays; default: all of the stage's."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of those steps that `wsd` decays over."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay; never on norms and biases, unless a group says so."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 = no clipping."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with numbers of their own, in order."""

    def check_updates(self, updates: int) -> None:
        """Raise ValueError unless the schedule fits a stage of `updates` optimizer steps."""
        end = self.decay_steps or updates
        if end > updates:
            raise ValueError(f"`optimizer.decay_steps` is {end}, more than the stage's {updates} optimizer steps")
        if self.warmup_steps > end:
            raise ValueError(f"`optimizer.warmup_steps` is {self.warmup_steps}, must be at most {end} optimizer steps")


class AdamWOptimizer(OptimizerBase, AdamMoments):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    """Optimizer."""


class SgdOptimizer(OptimizerBase):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient, as PyTorch's SGD does."""

    kind: Literal["sgd"] = "sgd"
    """Optimizer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the last step's direction that stays."""


class AdamWRest(AdamMoments):
    """AdamW of the parameters that Muon leaves: embeddings, output and score heads, norms, biases, routers."""

    lr: PositiveFloat | None = None
    """Peak learning rate; default: the optimizer's. Both follow one schedule."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; default: the optimizer's."""


class MuonOptimizer(OptimizerBase):
    """Momentum, orthogonalised, for the matrices of layers (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982); AdamW for all else."""

    kind: Literal["muon"] = "muon"
    """Optimizer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Share of the old momentum that stays."""
    nesterov: bool = True
    """Orthogonalise momentum and gradient together, instead of momentum alone."""
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz iterations."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of their products."""
    update_rms: PositiveFloat = 0.2
    """An update is lr * update_rms * sqrt(the larger side of the matrix) * the orthogonalised momentum, so that its entries are as large as
    AdamW's, whose learning rates then serve."""
    adamw: AdamWRest = AdamWRest()
    """For all parameters that are no matrix of a layer."""


OptimizerSpec = Annotated[AdamWOptimizer | SgdOptimizer | MuonOptimizer, Field(discriminator="kind")]
