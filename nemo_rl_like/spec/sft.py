"""The sft stage: supervised data and its loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec
from nemo_rl_like.spec.pretrain import PtxSpec
from nemo_rl_like.spec.stage import CheckpointSpec, EmaSpec, PresetStage


class SftDataSpec(Spec):
    """Supervised data: a file of messages, demonstrations of the environment's tasks, or what a `sample` stage kept."""

    path: str | None = None
    """JSONL file: one {"messages": [...]} a line; assistant messages are trained, each times its own "weight" if it has one."""
    environment_demonstrations: bool = False
    """Use the environment's own right answers on its train split."""
    from_stage: str | None = None
    """Stage whose dataset is trained; default: the last `sample` stage before this one, if no other source is given."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the data held out for the validation loss (the environment has a validation split of its own)."""

    @property
    def is_made(self) -> bool:
        """Whether an earlier stage makes the data."""
        return self.path is None and not self.environment_demonstrations

    @model_validator(mode="after")
    def _one_source(self) -> SftDataSpec:
        given = [self.path is not None, self.environment_demonstrations, self.from_stage is not None]
        if sum(given) > 1:
            raise ValueError("give at most one of `path`, `environment_demonstrations: true` and `from_stage`")
        return self


class SftStageSpec(PresetStage):
    """Supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    """Stage kind."""
    data: SftDataSpec = SftDataSpec()
    """Training data; default: what the last `sample` stage before this one kept."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    examples_per_step: PositiveInt = 64
    """Examples in one optimizer step."""
    loss: Literal["cross_entropy", "dft"] = "cross_entropy"
    """`dft` weighs each token's cross-entropy by its probability (dynamic fine-tuning); validation is cross-entropy either way."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean squared log-normaliser, which keeps logits from drifting (1e-4 is usual); 0 = off."""
    optimizer: OptimizerSpec = AdamWOptimizer(lr=1e-5)
    """Optimizer and schedule."""
    ema: EmaSpec | None = None
    """Average the weights over the steps; default: off."""
    ptx: PtxSpec | None = None
    """Mix the loss of pretraining text into each optimizer step; default: off."""
    validate_every_steps: NonNegativeInt = 0
    """Validation loss every this many steps; 0 = never."""
    validation_examples: PositiveInt = 256
    """Examples of one validation."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints of this stage."""
    init_from: str | None = None
    """Stage whose checkpoint this one starts from; default: the stage before it that makes one, or the model."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> SftStageSpec:
        self.optimizer.check_updates(self.steps)
        return self
