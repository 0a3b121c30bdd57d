"""The pretrain stage: next-token training on packed text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec
from nemo_rl_like.spec.stage import CheckpointSpec, EmaSpec, StageBase


class TextDataSpec(Spec):
    """Text: files of documents."""

    paths: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files of documents: rows (.jsonl, .jsonl.gz, .json, .parquet), any other is UTF-8 text with blank lines between documents; or folders of
    files of rows, as NeMo Curator writes them."""
    text_key: str = "text"
    """Key of the text in a row."""
    attend_across_documents: bool = False
    """Let the tokens of a packed row attend to the documents before their own."""


class PretrainDataSpec(TextDataSpec):
    """Training text, and what is held out of it."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the documents held out for the validation loss; equal documents stay on one side."""


class PtxSpec(TextDataSpec):
    """An auxiliary pretraining loss: in each optimizer step the stage's own loss + coef * cross-entropy on packed text (PPO-ptx)."""

    coef: PositiveFloat = 1.0
    """Weight of the text's cross-entropy, a mean over the trained tokens of its rows."""
    rows_per_step: PositiveInt = 8
    """Packed rows of text in one optimizer step."""
    sequence_tokens: Annotated[int, Field(ge=2)] | None = None
    """Length of a packed row, in tokens; default: the context."""


class PretrainStageSpec(StageBase):
    """Pretraining, or continued pretraining of a checkpoint."""

    kind: Literal["pretrain"] = "pretrain"
    """Stage kind."""
    data: PretrainDataSpec
    """Training text."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    rows_per_step: PositiveInt = 32
    """Packed rows in one optimizer step."""
    sequence_tokens: Annotated[int, Field(ge=2)] | None = None
    """Length of a packed row, in tokens; default: the context."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean squared log-normaliser, which keeps logits from drifting (1e-4 is usual); 0 = off."""
    optimizer: OptimizerSpec = AdamWOptimizer(lr=3e-4)
    """Optimizer and schedule."""
    ema: EmaSpec | None = None
    """Average the weights over the steps; default: off."""
    validate_every_steps: NonNegativeInt = 0
    """Validation loss every this many steps; 0 = never."""
    validation_rows: PositiveInt = 64
    """Packed rows of one validation, from the front of what is held out."""
    checkpoint: CheckpointSpec = CheckpointSpec(best_metric="validation/negative_loss")
    """Checkpoints of this stage."""
    init_from: str | None = None
    """Stage whose checkpoint this one starts from; default: the stage before it that makes one, or the model."""

    @model_validator(mode="after")
    def _stage_fits(self) -> PretrainStageSpec:
        self.optimizer.check_updates(self.steps)
        if self.validate_every_steps and not self.data.validation_fraction:
            raise ValueError(
                f"`validate_every_steps` is {self.validate_every_steps}, but `data.validation_fraction` is 0.0 and holds nothing out; "
                "set it above 0 (0.05 is usual), or leave `validate_every_steps` out"
            )
        return self
