"""What stages have in common: a name, checkpoints, sampling."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.settings import StageSettings


class EmaSpec(Spec):
    """An exponential moving average of the weights, in float32 beside the model: four further bytes a parameter."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the old average that stays after each optimizer step."""
    use: bool = True
    """Hand the average on: later stages, `nrl eval`, `nrl chat` and `nrl export` get it; false: it only stands in checkpoints."""


class CheckpointSpec(Spec):
    """When checkpoints are written and which are kept."""

    every_steps: NonNegativeInt = 0
    """Save every this many steps; 0 = only at the end of a stage (and on a signal)."""
    asynchronous: bool = False
    """Train on while a checkpoint is written: a step waits only until its tensors are copied to host memory, which must hold them once more."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """Best checkpoints by `best_metric` to keep beside them."""
    best_metric: str = "eval/accuracy"
    """Metric that ranks checkpoints; larger is better."""


class SamplingSpec(Spec):
    """How rollouts sample. Filters (top-p, top-k, min-p, penalties) do not exist here: they would bias the log-probs."""

    temperature: PositiveFloat = 1.0
    """Divides the logits."""
    max_new_tokens: PositiveInt = 256
    """Longest response over all turns, in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end a turn, beside the tokenizer's end token."""
    ignore_stop: bool = False
    """Always make `max_new_tokens` tokens (benchmarks)."""


class StageBase(Spec):
    """What every stage has."""

    name: str = ""
    """Name of the stage's folder; default: its kind."""
    settings: StageSettings | None = None
    """What this stage has otherwise than the experiment; default: nothing."""


class PresetStage(StageBase):
    """A stage whose method may be named."""

    preset: str | None = None
    """Named algorithm whose lines this stage's own are written over; `nrl algorithms` lists them."""
