"""Distillation: a student learns its teachers' distributions, live or from their stored log-probs.

The equation and the paper stand in `algorithms/distillation.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec
from nemo_rl_like.spec.stage import CheckpointSpec, PresetStage, SamplingSpec, StageBase

WHOLE_VOCABULARY_LIMIT = 2048
"""Most tokens of a vocabulary that is told whole at each place."""


class TeacherSpec(Spec):
    """A model to learn from, frozen, on the policy's ranks."""

    path: str | None = None
    """Hugging Face folder with the policy's tokenizer."""
    stage: str | None = None
    """Or: an earlier stage whose checkpoint teaches; its model may be another (`settings.model`) with the same tokenizer."""
    domain: str | None = None
    """It answers for rows whose `domain` is this; default: for all rows that no other teacher answers for."""

    @model_validator(mode="after")
    def _one_source(self) -> TeacherSpec:
        if (self.path is None) == (self.stage is None):
            raise ValueError("give exactly one of `path` and `stage`")
        return self


class TeachersSpec(Spec):
    """What is asked of the teachers."""

    teachers: tuple[TeacherSpec, ...] = ()
    """Teachers by the `domain` of a row; one without a domain answers for the rest."""
    top_k: NonNegativeInt | None = 64
    """Likeliest tokens of the teacher at each place, the rest counts as one; 0 or null: the whole vocabulary, if it is small."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of student and teachers."""

    @model_validator(mode="after")
    def _domains_differ(self) -> TeachersSpec:
        for domain, count in Counter(teacher.domain for teacher in self.teachers).items():
            if count > 1:
                whose = "no `domain`" if domain is None else f"the `domain` {domain!r}"
                raise ValueError(
                    f"`teachers` has {count} with {whose}; keep one of them, or give each a domain of its own"
                )
        return self

    def k_of(self, vocabulary: int) -> int:
        """Tokens at each place, of a model with `vocabulary` tokens. Raises ValueError when there are too few or too many."""
        if self.top_k:
            if self.top_k > vocabulary:
                raise ValueError(
                    f"`top_k` is {self.top_k}, more than the vocabulary's {vocabulary} tokens; lower it, or set 0 for all of them"
                )
            return self.top_k
        if vocabulary > WHOLE_VOCABULARY_LIMIT:
            raise ValueError(
                f"`top_k` is {self.top_k}: the whole vocabulary of {vocabulary} tokens at each place, and the limit is "
                f"{WHOLE_VOCABULARY_LIMIT}; use `top_k: 64` (the rest of the mass is kept as one event)"
            )
        return vocabulary


class DistillationSpec(Spec):
    """What is minimised."""

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), between them the generalized Jensen-Shannon one."""
    sft_coef: NonNegativeFloat = 0.0
    """Weight of the cross-entropy on the data's own responses that is added."""


class ConversationsSpec(Spec):
    """Conversations of a file, or those that an earlier stage kept."""

    path: str | None = None
    """JSONL file: one {"messages": [...], "domain"?} a line; prompts without a response will do where all are sampled."""
    from_stage: str | None = None
    """Or: the `sample` stage whose dataset it is."""

    @model_validator(mode="after")
    def _one_source(self) -> ConversationsSpec:
        if (self.path is None) == (self.from_stage is None):
            raise ValueError("give exactly one of `path` and `from_stage`")
        return self

    @property
    def file(self) -> str:
        """The file. Raises ValueError while an earlier stage has yet to make it."""
        if self.path is None:
            raise ValueError(f"stage {self.from_stage!r} makes the file")
        return self.path

    def made_at(self, path: str) -> Self:
        """The same data, with the file that the earlier stage made."""
        return self.model_copy(update={"path": path, "from_stage": None})


class DistillDataSpec(ConversationsSpec):
    """Conversations to distill on."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the conversations held out for the validation loss."""
    stored_logits: str | None = None
    """Folder that a `teacher_logits` stage wrote for this file; no teacher is loaded then."""
    stored_logits_stage: str | None = None
    """Or: an earlier `teacher_logits` stage that writes it."""

    @property
    def is_stored(self) -> bool:
        """Whether what the teachers say was written before."""
        return self.stored_logits is not None or self.stored_logits_stage is not None

    @model_validator(mode="after")
    def _one_store(self) -> DistillDataSpec:
        if self.stored_logits is not None and self.stored_logits_stage is not None:
            raise ValueError("`stored_logits` and `stored_logits_stage` are both given; leave one of them out")
        return self


class DistillStageSpec(PresetStage, TeachersSpec, DistillationSpec):
    """Distillation on responses of the data and on the student's own."""

    kind: Literal["distill"] = "distill"
    """Stage kind."""
    data: DistillDataSpec
    """Training data."""
    on_policy_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of each step's examples whose response the student samples; the rest are the data's."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling of the student's responses."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    examples_per_step: PositiveInt = 64
    """Examples in one optimizer step."""
    optimizer: OptimizerSpec = AdamWOptimizer(lr=1e-5)
    """Optimizer and schedule."""
    validate_every_steps: NonNegativeInt = 0
    """Validation loss, on the data's responses, every this many steps; 0 = never."""
    validation_examples: PositiveInt = 256
    """Examples of one validation."""
    checkpoint: CheckpointSpec = CheckpointSpec(best_metric="validation/agreement")
    """Checkpoints of this stage."""
    init_from: str | None = None
    """Stage whose checkpoint this one starts from; default: the stage before it that makes one, or the model."""

    @property
    def sampled_per_step(self) -> int:
        """Examples of a step whose response the student samples, to the nearest whole one."""
        return int(self.on_policy_fraction * self.examples_per_step + 0.5)

    @model_validator(mode="after")
    def _stage_fits(self) -> DistillStageSpec:
        self.optimizer.check_updates(self.steps)
        self._check_source()
        self._check_shares()
        if self.sft_coef and self.temperature != 1:
            raise ValueError(
                f"`sft_coef` is {self.sft_coef} and `temperature` {self.temperature}: cross-entropy is taken at temperature 1; set "
                "`temperature: 1.0`, or leave `sft_coef` out"
            )
        if self.validate_every_steps and not self.data.validation_fraction:
            raise ValueError(
                f"`validate_every_steps` is {self.validate_every_steps}, but `data.validation_fraction` is 0.0 and holds nothing out; "
                "set it above 0 (0.1 is usual), or leave `validate_every_steps` out"
            )
        return self

    def _check_source(self) -> None:
        if not self.data.is_stored and not self.teachers:
            raise ValueError("give `teachers`, or `data.stored_logits` that a `teacher_logits` stage wrote")
        if self.data.is_stored and self.on_policy_fraction:
            raise ValueError(
                f"`on_policy_fraction` is {self.on_policy_fraction}, but `data.stored_logits` knows the data's responses only; set "
                "`on_policy_fraction: 0`, or remove `stored_logits` and give `teachers`"
            )

    def _check_shares(self) -> None:
        if self.on_policy_fraction and not self.sampled_per_step:
            raise ValueError(
                f"`on_policy_fraction` {self.on_policy_fraction} of {self.examples_per_step} `examples_per_step` is no example; raise "
                "one of them, or set `on_policy_fraction: 0`"
            )
        if self.sft_coef and self.sampled_per_step == self.examples_per_step:
            raise ValueError(
                f"`sft_coef` is {self.sft_coef}, but every response is sampled and none is the data's; lower `on_policy_fraction`, or "
                "leave `sft_coef` out"
            )


class TeacherDataSpec(ConversationsSpec):
    """Conversations whose log-probs are stored."""


class TeacherLogitsStageSpec(StageBase, TeachersSpec):
    """Write the teachers' likeliest tokens for a file of conversations, once, for `distill` stages to train from."""

    kind: Literal["teacher_logits"] = "teacher_logits"
    """Stage kind."""
    data: TeacherDataSpec
    """The conversations."""
    teachers: Annotated[tuple[TeacherSpec, ...], Field(min_length=1)]
    """Teachers by the `domain` of a row; one without a domain answers for the rest."""
    examples_per_shard: PositiveInt = 256
    """Conversations in one file of the folder, and in one pass over it."""


def domains_of(teachers: Sequence[TeacherSpec]) -> dict[str | None, int]:
    """Number of the teacher by domain; None stands for all other domains."""
    return {teacher.domain: number for number, teacher in enumerate(teachers)}
