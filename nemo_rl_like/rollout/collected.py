"""What one rollout of a step is asked for and what came of it, and when a step may not go on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.rollout.episode import Episode
from nemo_rl_like.rollout.summary import RolloutSummary
from nemo_rl_like.spec.stage import SamplingSpec


class TooManyInvalid(NrlError):
    """More of a step's samples could not be scored than the spec allows."""


class WrongWeightVersion(NrlError):
    """The engine sampled with other weights than the step asked for."""


@dataclass(frozen=True, slots=True)
class CollectPlan:
    """One rollout of a step."""

    step: int
    """Rollout step; seeds depend on it."""
    task_ids: tuple[str, ...]
    """Training tasks; one that stands here twice makes two groups."""
    samples_per_prompt: int
    """Episodes of each."""
    version: int
    """Weight version that must sample them."""
    sampling: SamplingSpec
    """Temperature, limits, further stop ids."""
    first_group: int = 0
    """Number of the first task's group; a step that is rolled out in parts counts on."""
    greedy: bool = False
    """Also answer each task greedily, and keep the reward as a column."""
    show: int = 0
    """Episodes whose text is in the summary."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The episodes of one rollout."""

    plan: CollectPlan
    episodes: list[Episode]
    greedy: list[Episode] | None
    """The greedy answer of each group, if asked for."""
    restarts: int
    """Environment processes that were replaced meanwhile."""
    seconds: Mapping[str, float]
    """Wall time by part."""
    opponents: list[Episode] | None = None
    """The opponent's answer to each episode's prompt, if asked for."""

    @property
    def all(self) -> list[Episode]:
        """Every episode: the policy's, then greedy ones, then the opponent's."""
        return [*self.episodes, *(self.greedy or ()), *(self.opponents or ())]

    def with_all(self, episodes: Sequence[Episode]) -> Collected:
        """The same rollout with others in the place of `all`."""
        left = iter(episodes)
        mine, greedy, theirs = (
            None if old is None else list(islice(left, len(old)))
            for old in (self.episodes, self.greedy, self.opponents)
        )
        return replace(self, episodes=mine or [], greedy=greedy, opponents=theirs)


def check_invalid(summary: RolloutSummary, episodes: Sequence[Episode], most: float) -> None:
    """Raise TooManyInvalid when a larger fraction than `most` of a rollout's samples is invalid."""
    if summary.invalid_fraction <= most:
        return
    causes = ", ".join(f"{count} {reason}" for reason, count in sorted(summary.invalid.items()))
    example = next(episode for episode in episodes if episode.invalid is not None)
    raise TooManyInvalid(
        f"step {summary.step}: {sum(summary.invalid.values())} of {summary.episodes} samples could not be scored ({causes}), more than "
        f"`environment.max_invalid_fraction` = {most:g} allows. First: task {example.task_id}: "
        f"{example.detail or example.invalid}"
    )


def check_versions(episodes: Sequence[Episode], version: int) -> None:
    """Raise WrongWeightVersion unless each sampled token comes from weight version `version`."""
    for episode in episodes:
        seen = {v for segment in episode.segments for v in segment.version if v >= 0}
        if seen - {version}:
            raise WrongWeightVersion(
                f"episode {episode.id} was sampled with weight version {sorted(seen)}, but the step asked for {version}; the weight sync "
                "before this step did not reach the engine"
            )
