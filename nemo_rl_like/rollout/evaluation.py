"""What an evaluation says: greedy reward and avg@k, task by task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_like.rollout.episode import Episode
from nemo_rl_like.rollout.summary import spread_of


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task's answers."""

    task_id: str
    prompt: str
    response: str
    """The greedy answer."""
    greedy: float
    """Its reward; NaN if invalid."""
    sampled: tuple[float, ...]
    """Rewards of the samples; NaN where invalid."""


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """One evaluation."""

    split: str
    """Split that was asked."""
    tasks: int
    """Number of tasks."""
    samples_per_task: int
    """k of avg@k; 0 = greedy only."""
    greedy: float
    """Mean reward of the valid greedy answers (the accuracy, where rewards are 0 or 1)."""
    sampled: float
    """avg@k: mean over tasks of the mean reward of a task's valid samples; NaN without samples."""
    invalid: Mapping[str, int]
    """Answers that could not be scored, by cause; they are in no mean."""
    results: tuple[TaskResult, ...]
    """Task by task, in order."""
    seconds: Mapping[str, float]
    """Wall time by part."""

    def metrics(self) -> dict[str, float]:
        """Numbers by metric name."""
        out = {"eval/accuracy": self.greedy, "eval/invalid": float(sum(self.invalid.values()))}
        if self.samples_per_task:
            out[f"eval/avg@{self.samples_per_task}"] = self.sampled
        return out | {f"timing/eval_{part}": value for part, value in self.seconds.items()}


def report_of(
    split: str,
    greedy: Sequence[Episode],
    sampled: Sequence[Episode],
    samples_per_task: int,
    seconds: Mapping[str, float],
) -> EvaluationReport:
    """Report of one greedy episode and `samples_per_task` sampled ones a task, both in the order of the tasks."""
    results = [
        TaskResult(
            task_id=one.task_id,
            prompt=one.prompt,
            response=one.response,
            greedy=one.reward,
            sampled=tuple(e.reward for e in sampled[i * samples_per_task : (i + 1) * samples_per_task]),
        )
        for i, one in enumerate(greedy)
    ]
    task_means = [spread_of(_valid(result.sampled)).mean for result in results]
    return EvaluationReport(
        split=split,
        tasks=len(results),
        samples_per_task=samples_per_task,
        greedy=spread_of(_valid([result.greedy for result in results])).mean,
        sampled=spread_of(_valid(task_means)).mean,
        invalid=Counter(e.invalid for e in (*greedy, *sampled) if e.invalid is not None),
        results=tuple(results),
        seconds=dict(seconds),
    )


def _valid(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
