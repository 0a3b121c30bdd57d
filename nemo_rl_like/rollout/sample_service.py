"""`SampleService`: a rollout service that draws episodes, keeps the best of each prompt, and writes them as examples, part by part.

A part is a JSON file with the counts and lines of a batch of whole prompts. It appears whole or not at all, so what is there after a
kill need not be drawn again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.files import atomic_write
from nemo_rl_like.rollout.choice import Counts, Rule, choose, counts_of, example_line
from nemo_rl_like.rollout.collected import Collected, CollectPlan
from nemo_rl_like.rollout.episode import Episode
from nemo_rl_like.rollout.runner import Generator
from nemo_rl_like.rollout.seeds import seed_of
from nemo_rl_like.rollout.service import TRAIN, RolloutService
from nemo_rl_like.spec.sample import SampleStageSpec

PURPOSE = "sample"
"""Part of every seed, so that these draws differ from those of training and evaluation."""


@dataclass(frozen=True, slots=True)
class Part:
    """A batch of prompts and what was kept of it."""

    counts: Counts
    lines: tuple[str, ...]

    def to_json(self) -> bytes:
        """The file's bytes."""
        return json.dumps({"counts": asdict(self.counts), "lines": self.lines}, ensure_ascii=False).encode()


def read_part(file: Path) -> Part:
    """The part that `draw` wrote. Raises InputError for another file."""
    try:
        value = json.loads(file.read_bytes())
        return Part(Counts(**value["counts"]), tuple(value["lines"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: is no part of a sample stage ({error}); remove it, and it is drawn again") from error


class SampleService(RolloutService):
    """Best-of-n on the environment's training tasks."""

    def draw(
        self, stage: SampleStageSpec, first: int, count: int, version: int, engine: Generator, file: str
    ) -> Counts:
        """Sample tasks number `first` to `first + count` of the train split, and write what is kept to `file`; returns the counts.

        A sample's seed depends on its task's number and its own, so neither the cut into batches nor a restart changes it.
        Raises as `collect` does.
        """
        tasks = list(self._split(TRAIN).values())[first : first + count]
        plan = CollectPlan(
            step=0,
            task_ids=tuple(task.id for task in tasks),
            samples_per_prompt=stage.samples_per_prompt,
            version=version,
            sampling=stage.sampling,
            first_group=first,
        )
        runner = self._runner(engine, stage.sampling.max_new_tokens)
        restarts = self._pool.restarts
        episodes = self._sampled(runner, plan, tasks, PURPOSE)
        self._summary(Collected(plan, episodes, None, self._pool.restarts - restarts, runner.timing.seconds))
        part = part_of(episodes, stage, self._run_seed)
        atomic_write(Path(file), part.to_json())
        return part.counts


def part_of(episodes: Sequence[Episode], stage: SampleStageSpec, seed: int) -> Part:
    """What the stage keeps of whole prompts' episodes, which follow each other prompt by prompt."""
    rule = Rule(stage.keep, stage.min_reward, stage.keep_truncated, _rank(stage, seed))
    counts, lines = Counts(), list[str]()
    for start in range(0, len(episodes), stage.samples_per_prompt):
        group = episodes[start : start + stage.samples_per_prompt]
        kept = choose(group, rule)
        counts += counts_of(group, kept)
        lines += [example_line(episode, episode.id % stage.samples_per_prompt) for episode in kept]
    return Part(counts, tuple(lines))


def _rank(stage: SampleStageSpec, seed: int) -> Callable[[Episode], float]:
    if stage.choose == "best":
        return lambda episode: -episode.reward
    return lambda episode: seed_of("choose", seed, episode.id)
