"""`RolloutService`: the actor that turns tasks into a `TokenBatch`, and evaluates."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.redaction import watch
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.environment.pool import EnvironmentPool
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.environment.types import Task, Unscorable
from nemo_rl_like.generation.types import Sampling
from nemo_rl_like.rollout.collected import Collected, CollectPlan, check_invalid, check_versions
from nemo_rl_like.rollout.dialogue import dialogue_of
from nemo_rl_like.rollout.episode import Episode, episode_rows
from nemo_rl_like.rollout.evaluation import EvaluationReport, report_of
from nemo_rl_like.rollout.judging import judged, rows_to_score, scores_of
from nemo_rl_like.rollout.live import Plan
from nemo_rl_like.rollout.loop import LoopThread
from nemo_rl_like.rollout.pairing import against, best_and_worst, pair_rows
from nemo_rl_like.rollout.records import append_records
from nemo_rl_like.rollout.runner import EpisodeRunner, Generator, Limits, check_prompt_length
from nemo_rl_like.rollout.summary import RolloutSummary, summarize
from nemo_rl_like.rollout.taskorder import TaskList, task_list
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.evaluate import EvaluationSpec
from nemo_rl_like.spec.reward_model import ProcessScores, RewardModelSpec
from nemo_rl_like.spec.stage import SamplingSpec
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows

log = logging.getLogger(__name__)

TRAIN = "train"
_CHECK_BATCH = 256


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """Prompts that were found to fit the context."""

    tasks: int
    """Tasks that were rendered."""
    longest: int
    """Tokens of the longest prompt."""
    longest_task: str
    """Its task."""


class RolloutService:
    """Episodes, and the environment processes they run in. One per run; every call is synchronous."""

    def __init__(
        self,
        context: RankContext | None,
        *,
        environment_json: str,
        tokenizer_folder: str,
        run_seed: int,
        max_context: int,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the environment processes.

        Args:
            context: place in the worker group; None outside one.
            environment_json: JSON of the spec's `environment` block, with absolute paths.
            tokenizer_folder: Hugging Face folder with tokenizer and chat template.
            run_seed: the spec's `seed`.
            max_context: longest row, in tokens.
            extra_env: further variables of the environment processes (secrets they need).

        Raises:
            SpecError, InputError: the environment or the tokenizer cannot be used.
        """
        self._context = context
        self._spec = EnvironmentSpec.model_validate_json(environment_json)
        self._source = resolve(self._spec)
        self._renderer = Renderer.load(tokenizer_folder)
        self._run_seed = run_seed
        self._max_context = max_context
        self._tasks: dict[str, dict[str, Task]] = {}
        self._last: Collected | None = None
        self._loop = LoopThread("environments")
        watch(extra_env or {})
        self._pool = EnvironmentPool(self._spec, extra_env=extra_env)
        self._loop.run(self._pool.start())
        self._dialogue = dialogue_of(self._source, self._pool, self._loop)

    def task_list(self, split: str) -> TaskList:
        """Ids and hash of a split's tasks. Raises InputError if there are none."""
        tasks = list(self._split(split).values())
        if not tasks:
            raise InputError(f"the environment's {split} split has no tasks; raise its size in `environment.config`")
        return task_list(split, tasks)

    def check_prompts(self, split: str, tasks: int | None = None) -> PromptCheck:
        """Render the prompts of a split's first `tasks` (default: all) and check that each leaves room for an answer.

        Raises InputError naming the task.
        """
        chosen = list(self._split(split).values())[:tasks]
        longest, longest_task = 0, ""
        for start in range(0, len(chosen), _CHECK_BATCH):
            plans = self._plans(chosen[start : start + _CHECK_BATCH], 1, purpose="check", step=0)
            resets = self._dialogue.open(plans)
            self._dialogue.drop(plans)
            for plan, reset in zip(plans, resets, strict=True):
                if isinstance(reset, Unscorable):
                    raise InputError(f"task {plan.task.id}: the environment cannot ask it: {reset}")
                length = len(self._renderer.prompt_ids(reset.messages, reset.tools))
                check_prompt_length(plan.task.id, length, self._max_context)
                longest, longest_task = max((longest, longest_task), (length, plan.task.id))
        return PromptCheck(tasks=len(chosen), longest=longest, longest_task=longest_task)

    def collect(self, plan: CollectPlan, engine: Generator) -> tuple[TokenBatch, RolloutSummary]:
        """Sample the plan's episodes with `engine` and batch them.

        Raises:
            InputError: an unknown task, or a prompt that leaves no room for an answer.
            TooManyInvalid: more than `max_invalid_fraction` of the episodes are invalid.
            WrongWeightVersion: the engine sampled with other weights.
            EnvironmentContractError: the environment broke its interface.
        """
        self.sample(plan, engine)
        return self._made()

    def sample(self, plan: CollectPlan, engine: Generator) -> None:
        """The first half of `collect`: sample and grade the plan's episodes, and keep them here. Raises as `collect` does."""
        known = self._split(TRAIN)
        tasks = [_known(known, task_id) for task_id in plan.task_ids]
        runner = self._runner(engine, plan.sampling.max_new_tokens)
        restarts = self._pool.restarts
        episodes = self._sampled(runner, plan, tasks, TRAIN)
        greedy = self._greedy(runner, plan, tasks) if plan.greedy else None
        self._last = Collected(plan, episodes, greedy, self._pool.restarts - restarts, runner.timing.seconds)

    def _sampled(self, runner: EpisodeRunner, plan: CollectPlan, tasks: Sequence[Task], purpose: str) -> list[Episode]:
        """The plan's episodes, group by group; `purpose` is part of every seed."""
        samples, group = plan.samples_per_prompt, plan.first_group
        plans = self._plans(tasks, samples, purpose=purpose, step=plan.step, first_group=group)
        episodes = runner.run(plans, self._engine_sampling(plan.sampling))
        check_versions(episodes, plan.version)
        return episodes

    def _made(self) -> tuple[TokenBatch, RolloutSummary]:
        """Batch and summary of the last sampled episodes. Raises TooManyInvalid."""
        last = self._collected()
        summary = self._summary(last)
        greedy = None if last.greedy is None else {episode.group_id: episode.reward for episode in last.greedy}
        return batch_rows(episode_rows(last.episodes, greedy, last.opponents)), summary

    def _summary(self, last: Collected) -> RolloutSummary:
        """Small numbers of these episodes. Raises TooManyInvalid."""
        summary = summarize(
            last.episodes,
            step=last.plan.step,
            version=last.plan.version,
            seconds=last.seconds,
            restarts=last.restarts,
            show=last.plan.show,
        )
        check_invalid(summary, last.episodes, self._spec.max_invalid_fraction)
        return summary

    def collect_to_store(
        self, plan: CollectPlan, engine: Generator
    ) -> tuple[ray.ObjectRef[TokenBatch], RolloutSummary]:
        """`collect` with the batch in Ray's object store, so that the driver gets a reference and a summary."""
        batch, summary = self.collect(plan, engine)
        return ray.put(batch), summary

    def sample_opponent(self, opponent: Generator) -> None:
        """Let another engine answer each of the last sampled episodes' prompts, with seeds of its own.

        A sample whose opponent could not be scored is compared with nothing, so it becomes invalid too.
        """
        last = self._collected()
        known = self._split(TRAIN)
        tasks = [_known(known, task_id) for task_id in last.plan.task_ids]
        samples, first = last.plan.samples_per_prompt, last.plan.first_group
        plans = self._plans(tasks, samples, purpose="opponent", step=last.plan.step, first_group=first, asked_as=TRAIN)
        runner = self._runner(opponent, last.plan.sampling.max_new_tokens)
        theirs = runner.run(plans, self._engine_sampling(last.plan.sampling))
        episodes = [
            replace(mine, invalid="opponent", reward=math.nan, detail=other.detail)
            if mine.invalid is None and other.invalid is not None
            else mine
            for mine, other in zip(last.episodes, theirs, strict=True)
        ]
        seconds = {**last.seconds, "opponent": sum(runner.timing.seconds.values())}
        self._last = replace(last, episodes=episodes, opponents=theirs, seconds=seconds)

    def batch_to_store(self) -> tuple[ray.ObjectRef[TokenBatch], RolloutSummary]:
        """Batch and summary of the last sampled episodes. Raises TooManyInvalid."""
        batch, summary = self._made()
        return ray.put(batch), summary

    def pairs_to_store(self) -> tuple[ray.ObjectRef[TokenBatch] | None, int]:
        """Pairs of the last sampled episodes, with the opponent's where there is one, and their number; None if there is none."""
        last = self._collected()
        pairs = best_and_worst(last.episodes) if last.opponents is None else against(last.episodes, last.opponents)
        rows = pair_rows(pairs, last.opponents or ())
        return (ray.put(batch_rows(rows)) if rows else None), len(pairs)

    def rows_to_score(self, process: ProcessScores | None) -> ray.ObjectRef[TokenBatch] | None:
        """What a reward model reads of the last sampled episodes, greedy and opponent's ones among them; None if none is valid."""
        enders = None if process is None else self._renderer.ids_ending_with(process.separator)
        rows = rows_to_score(self._collected().all, enders)
        return None if rows is None else ray.put(rows)

    def judged_to_store(
        self, spec: RewardModelSpec, rows: TokenBatch | None, *values: Tensor
    ) -> tuple[ray.ObjectRef[TokenBatch], RolloutSummary]:
        """Batch and summary of the last sampled episodes with the scores of reward models in their rewards.

        `values`: float32 [N] of each model at the tokens of `rows`, which `rows_to_score` gave. Raises TooManyInvalid.
        """
        last = self._collected()
        if rows is not None:
            scores = scores_of(rows, values, spec)
            self._last = last.with_all(judged(last.all, scores, spec, scored=self._spec.scores))
        return self.batch_to_store()

    def _collected(self) -> Collected:
        if self._last is None:
            raise RuntimeError("nothing was sampled yet")
        return self._last

    def _greedy(self, runner: EpisodeRunner, plan: CollectPlan, tasks: Sequence[Task]) -> list[Episode]:
        """The greedy answer of each group."""
        plans = self._plans(tasks, 1, purpose="greedy", step=plan.step, first_group=plan.first_group, asked_as=TRAIN)
        return runner.run(plans, replace(self._engine_sampling(plan.sampling), greedy=True))

    def append_records(self, path: str, offset: int) -> int:
        """Write the last sampled episodes to a JSONL file from byte `offset` on; the new offset."""
        last = self._collected()
        return append_records(Path(path), offset, last.plan.step, last.episodes)

    def evaluate(self, evaluation: EvaluationSpec, engine: Generator) -> EvaluationReport:
        """Ask held-out tasks: greedily, and `samples_per_task` times at `temperature`.

        The same run seed gives the same sampling seeds in every evaluation, so that checkpoints are compared on equal draws.

        Raises InputError (no tasks, prompt too long), EnvironmentContractError.
        """
        tasks = list(self._split(evaluation.split).values())[: evaluation.tasks]
        if not tasks:
            raise InputError(
                f"the environment's {evaluation.split} split has no tasks; raise its size in `environment.config`"
            )
        runner = self._runner(engine, evaluation.max_new_tokens)
        stops = self._renderer.stop_ids
        greedy = runner.run(
            self._plans(tasks, 1, purpose=f"{evaluation.split}-greedy", step=0),
            Sampling(greedy=True, stop_token_ids=stops),
        )
        sampled: list[Episode] = []
        if evaluation.samples_per_task:
            sampled = runner.run(
                self._plans(tasks, evaluation.samples_per_task, purpose=f"{evaluation.split}-sampled", step=0),
                Sampling(temperature=evaluation.temperature, stop_token_ids=stops),
            )
        return report_of(evaluation.split, greedy, sampled, evaluation.samples_per_task, runner.timing.seconds)

    def close(self) -> None:
        """Kill the environment processes."""
        self._loop.run(self._pool.aclose())
        self._loop.close()

    def _split(self, split: str) -> dict[str, Task]:
        if split not in self._tasks:
            tasks = self._source.tasks(split)
            self._tasks[split] = {task.id: task for task in tasks}
            if len(self._tasks[split]) != len(tasks):
                raise InputError(
                    f"the environment's {split} split has {len(tasks)} tasks but {len(self._tasks[split])} different ids"
                )
        return self._tasks[split]

    def _plans(
        self,
        tasks: Sequence[Task],
        samples: int,
        *,
        purpose: str,
        step: int,
        first_group: int = 0,
        asked_as: str = "",
    ) -> list[Plan]:
        return [
            Plan(
                episode_id=group * samples + sample,
                group_id=group,
                sample=sample,
                task=task,
                purpose=purpose,
                asked_as=asked_as,
                run_seed=self._run_seed,
                step=step,
            )
            for group, task in enumerate(tasks, start=first_group)
            for sample in range(samples)
        ]

    def _runner(self, engine: Generator, max_new_tokens: int) -> EpisodeRunner:
        limits = Limits(max_turns=self._spec.max_turns, max_new_tokens=max_new_tokens, max_context=self._max_context)
        return EpisodeRunner(self._dialogue, self._renderer, engine, limits)

    def _engine_sampling(self, sampling: SamplingSpec) -> Sampling:
        return Sampling(
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=tuple(sorted({*self._renderer.stop_ids, *sampling.stop_token_ids})),
            ignore_stop=sampling.ignore_stop,
        )


def _known(tasks: Mapping[str, Task], task_id: str) -> Task:
    if task_id not in tasks:
        raise InputError(f"task {task_id!r} is not in the environment's train split of {len(tasks)} tasks")
    return tasks[task_id]
