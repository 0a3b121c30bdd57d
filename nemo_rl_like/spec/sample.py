"""The sample stage: the best of n answers to each task become a supervised dataset."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from nemo_rl_like.spec.stage import PresetStage, SamplingSpec


class SampleStageSpec(PresetStage):
    """Best-of-n and rejection sampling from an environment's training tasks."""

    kind: Literal["sample"] = "sample"
    """Stage kind."""
    tasks: PositiveInt | None = None
    """Number of tasks, from the front of the train split; default: all."""
    samples_per_prompt: PositiveInt = 8
    """Episodes of each task: the n of best-of-n."""
    sampling: SamplingSpec = SamplingSpec()
    """How they are sampled."""
    keep: PositiveInt = 1
    """Most episodes that are kept of one task; equal ones count once."""
    min_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Smallest reward that is kept; null: any."""
    choose: Literal["best", "random"] = "best"
    """`best`: highest rewards first; `random`: in a random order, the control that shows what choosing is worth."""
    keep_truncated: bool = False
    """Keep episodes that were cut by a limit too; training on one teaches to end where it was cut."""
    prompts_per_batch: PositiveInt = 32
    """Tasks sampled between two writes: what a kill can lose."""
    init_from: str | None = None
    """Stage whose checkpoint samples; default: the stage before it that makes one, or the model."""

    @model_validator(mode="after")
    def _keeps_what_it_draws(self) -> SampleStageSpec:
        if self.keep > self.samples_per_prompt:
            raise ValueError(f"`keep` is {self.keep}, more than the {self.samples_per_prompt} of `samples_per_prompt`")
        return self
