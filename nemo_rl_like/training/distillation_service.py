"""`DistillationService`: batches of the data's and of the student's own responses, with what teachers say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from torch import Tensor

from nemo_rl_like.algorithms.distillation import IDS, LOGPROBS
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.distill_rows import Conversation, ConversationDataset, load_conversations, own_rows, sampled_row
from nemo_rl_like.data.order import DataPosition, check_resumes
from nemo_rl_like.data.stored_logits import LogitsOrigin, StoredLogits, extras_of
from nemo_rl_like.data.trained_rows import TrainedRows
from nemo_rl_like.generation.types import Completion, Request, Sampling
from nemo_rl_like.rollout.collected import WrongWeightVersion
from nemo_rl_like.rollout.runner import Generator
from nemo_rl_like.rollout.seeds import sample_seed
from nemo_rl_like.spec.distill import DistillDataSpec, DistillStageSpec, domains_of
from nemo_rl_like.spec.stage import SamplingSpec
from nemo_rl_like.tokens.batch import Row, TokenBatch
from nemo_rl_like.training.data_service import DataBatch, DataService, FileExamples


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """The examples of one step."""

    step: int
    """Optimizer step; seeds depend on it."""
    examples: int
    """All of them."""
    sampled: int
    """Those whose response the student samples."""
    version: int
    """Weight version that must sample them."""
    sampling: SamplingSpec
    """How."""


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """A step's batch and what was sampled for it."""

    made: DataBatch
    metrics: dict[str, float]


class DistillationService(DataService[Conversation]):
    """Batches of conversations."""

    def __init__(
        self,
        context: RankContext | None,
        *,
        data: DistillDataSpec,
        teachers: Mapping[str | None, int],
        origin: LogitsOrigin,
        tokenizer_folder: str,
        seed: int,
        max_tokens: int,
    ) -> None:
        """Read and check the data, and stored log-probs against `origin` where the data names some. Raises InputError."""
        self._seed = seed
        self._stored: StoredLogits | None = None
        if data.stored_logits is not None:
            self._stored = open_stored(data.stored_logits, origin)
        examples = _split(load_conversations(data.file, teachers), data, seed)
        super().__init__(examples, tokenizer_folder=tokenizer_folder, seed=seed, max_tokens=max_tokens)

    def mixed(self, position: DataPosition, plan: MixedPlan, engine: Generator) -> MixedBatch:
        """The next examples, the first `plan.sampled` of them with a response that `engine` samples.

        Raises InputError as `batch` does, and WrongWeightVersion if other weights sampled.
        """
        check_resumes(position, self._examples.sha256, self._examples.source)
        draws = self._order.draws(position.consumed, plan.examples)
        examples = [self._examples.train(draw.index, draw.epoch) for draw in draws]
        asked, given = examples[: plan.sampled], examples[plan.sampled :]
        sampled, metrics = self._sampled(asked, plan, engine)
        own = own_rows(given, self._renderer, max_tokens=self._max_tokens, first=len(asked))
        made = TrainedRows(
            (*sampled, *own.rows), own.dropped_untrained, own.dropped_too_long + len(asked) - len(sampled)
        )
        return MixedBatch(self._batched(made, examples, position.advance(plan.examples)), metrics)

    def attach(self, batch: TokenBatch, ids: Sequence[Tensor], logprobs: Sequence[Tensor]) -> ray.ObjectRef:
        """The batch with what its teachers say, each of its own rows and 0 elsewhere."""
        return ray.put(batch.with_extras(**{IDS: total(ids), LOGPROBS: total(logprobs)}))

    def _rows(self, examples: Sequence[Conversation]) -> TrainedRows:
        return own_rows(examples, self._renderer, max_tokens=self._max_tokens)

    def _finished(self, batch: TokenBatch, examples: Sequence[Conversation]) -> TokenBatch:
        if self._stored is None:
            return batch
        told = [self._stored.of(example.index) for example in examples]
        return batch.with_extras(**extras_of(told, batch.tokens, batch.loss_mask, self._examples.source))

    def _sampled(
        self, examples: Sequence[Conversation], plan: MixedPlan, engine: Generator
    ) -> tuple[list[Row], dict[str, float]]:
        """Rows of the student's responses, but for prompts that leave no room for one; and their metrics."""
        prompts = [self._renderer.prompt_ids(example.prompt) for example in examples]
        fit = [i for i, prompt in enumerate(prompts) if len(prompt) < self._max_tokens]
        requests = [
            Request(f"distill-{plan.step}-{i}", prompts[i], (sample_seed("distill", self._seed, plan.step, i, 0, 0),))
            for i in fit
        ]
        answers = [answer for (answer,) in engine.generate(requests, self._how(plan.sampling))] if requests else []
        _check_versions(answers, plan.version)
        rows = [
            sampled_row(prompts[i], c.ids, c.logprobs, version=c.version, number=i, teacher=examples[i].teacher)
            for i, c in zip(fit, answers, strict=True)
            if c.ids
        ]
        return rows, _metrics(answers)

    def _how(self, sampling: SamplingSpec) -> Sampling:
        return Sampling(
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=tuple(sorted({*self._renderer.stop_ids, *sampling.stop_token_ids})),
            ignore_stop=sampling.ignore_stop,
        )


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of which each is 0 where another is not."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def open_stored(folder: str, origin: LogitsOrigin) -> StoredLogits:
    """Stored log-probs that were made as `origin` says. Raises InputError."""
    stored = StoredLogits(folder)
    origin.check(stored.origin, Path(folder))
    return stored


def _split(dataset: ConversationDataset, data: DistillDataSpec, seed: int) -> FileExamples[Conversation]:
    """The conversations, a fraction of them held out by content."""
    fraction = data.validation_fraction
    return FileExamples(dataset.source, dataset.sha256, dataset.examples, lambda c: c.messages, fraction, seed)


def check_distillation(stage: DistillStageSpec, seed: int) -> None:
    """Open the data and see that it has what the stage reads. Raises InputError."""
    dataset = load_conversations(stage.data.file, domains_of(stage.teachers))
    reads_responses = stage.sampled_per_step < stage.examples_per_step or stage.validate_every_steps > 0
    for conversation in dataset.examples:
        if reads_responses and not conversation.has_response:
            raise InputError(
                f"{conversation.where}: has no assistant message, and {stage.on_policy_fraction:g} of the responses are sampled; add "
                "one, or set `on_policy_fraction: 1` without validation"
            )
        if stage.sampled_per_step and not conversation.prompt:
            raise InputError(
                f"{conversation.where}: has no message before the response; the student needs a prompt to answer"
            )
    held = len(_split(dataset, stage.data, seed).validation(stage.validation_examples))
    if stage.validate_every_steps and not held:
        raise InputError(
            f"{dataset.source}: `data.validation_fraction` {stage.data.validation_fraction} holds out no conversation, and "
            "`validate_every_steps` needs some; raise it, or set `validate_every_steps: 0`"
        )


def _check_versions(answers: Sequence[Completion], version: int) -> None:
    seen = {answer.version for answer in answers}
    if seen - {version}:
        raise WrongWeightVersion(
            f"responses were sampled with weight version {sorted(seen)}, but the step asked for {version}; the weight sync before this "
            "step did not reach the engine"
        )


def _metrics(answers: Sequence[Completion]) -> dict[str, float]:
    """TRL's names; 0 where nothing was sampled."""
    count = max(len(answers), 1)
    return {
        "completions/mean_length": sum(len(answer.ids) for answer in answers) / count,
        "completions/clipped_ratio": sum(answer.stop == "length" for answer in answers) / count,
    }
