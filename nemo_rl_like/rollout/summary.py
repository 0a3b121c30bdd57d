"""`RolloutSummary`: the small numbers of one rollout step, under the field's metric names."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_like.rollout.episode import Episode


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation (N-1; 0 for one value, NaN for none)."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class SampleText:
    """One episode to be shown to a person."""

    episode_id: int
    group_id: int
    task_id: str
    prompt: str
    response: str
    reward: float
    stop: str


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """What the driver learns of a rollout step."""

    step: int
    """Rollout step."""
    version: int
    """Weight version that sampled."""
    episodes: int
    """Episodes, valid or not."""
    groups: int
    """Drawn prompts."""
    rewards: Mapping[str, Spread]
    """`reward` and its parts by name, over valid episodes."""
    frac_reward_zero_std: float
    """Share of groups that teach a group-relative estimator nothing: rewards all equal, or fewer than two valid."""
    lengths: tuple[int, ...]
    """Sampled tokens of each episode."""
    prompt_tokens: float
    """Mean tokens of the first prompt."""
    turns: float
    """Mean answers an episode."""
    stops: Mapping[str, int]
    """Episodes by stop reason."""
    invalid: Mapping[str, int]
    """Invalid episodes by cause."""
    restarts: int
    """Environment processes that were replaced in this step."""
    environment: Mapping[str, float]
    """The environment's further numbers: mean over valid episodes."""
    seconds: Mapping[str, float]
    """Wall time by part."""
    samples: tuple[SampleText, ...]
    """Episodes to be shown, of different groups as far as there are any."""

    @property
    def invalid_fraction(self) -> float:
        """Share of the episodes that are invalid."""
        return sum(self.invalid.values()) / self.episodes

    def metrics(self) -> dict[str, float]:
        """Numbers by metric name."""
        out = {"reward": self.rewards["reward"].mean, "reward_std": self.rewards["reward"].std}
        for name, spread in self.rewards.items():
            if name != "reward":
                out |= {f"rewards/{name}/mean": spread.mean, f"rewards/{name}/std": spread.std}
        out |= {
            "frac_reward_zero_std": self.frac_reward_zero_std,
            "completions/mean_length": statistics.fmean(self.lengths),
            "completions/min_length": float(min(self.lengths)),
            "completions/max_length": float(max(self.lengths)),
            "completions/clipped_ratio": self.stops.get("length", 0) / self.episodes,
            "prompts/mean_length": self.prompt_tokens,
            "turns/mean": self.turns,
            "invalid/fraction": self.invalid_fraction,
            "restarts/environment": float(self.restarts),
        }
        out |= {f"stop/{reason}": float(count) for reason, count in sorted(self.stops.items())}
        out |= {f"invalid/{reason}": float(count) for reason, count in sorted(self.invalid.items())}
        out |= {f"environment/{name}": value for name, value in sorted(self.environment.items())}
        return out | {f"timing/{part}": value for part, value in self.seconds.items()}


def summarize(
    episodes: Sequence[Episode],
    *,
    step: int,
    version: int,
    seconds: Mapping[str, float],
    restarts: int = 0,
    show: int = 0,
) -> RolloutSummary:
    """Summary of a step's episodes; `show` of them with their texts."""
    valid = [episode for episode in episodes if episode.invalid is None]
    groups = _groups(episodes)
    return RolloutSummary(
        step=step,
        version=version,
        episodes=len(episodes),
        groups=len(groups),
        rewards=_rewards(valid),
        frac_reward_zero_std=sum(_flat(group) for group in groups.values()) / len(groups),
        lengths=tuple(episode.sampled_tokens for episode in episodes),
        prompt_tokens=statistics.fmean(episode.segments[0].prompt_len for episode in episodes),
        turns=statistics.fmean(episode.turns for episode in episodes),
        stops=Counter(episode.stop for episode in episodes),
        invalid=Counter(episode.invalid for episode in episodes if episode.invalid is not None),
        restarts=restarts,
        environment=_means([episode.metrics for episode in valid]),
        seconds=dict(seconds),
        samples=tuple(_shown(groups, show)),
    )


def spread_of(values: Sequence[float]) -> Spread:
    """Mean and spread of the values."""
    if not values:
        return Spread(float("nan"), float("nan"))
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


def _groups(episodes: Sequence[Episode]) -> dict[int, list[Episode]]:
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    return groups


def _flat(group: Sequence[Episode]) -> bool:
    rewards = [episode.reward for episode in group if episode.invalid is None]
    return len(rewards) < 2 or max(rewards) == min(rewards)


def _rewards(valid: Sequence[Episode]) -> dict[str, Spread]:
    names = sorted({name for episode in valid for name in episode.rewards})
    parts = {name: spread_of([e.rewards[name] for e in valid if name in e.rewards]) for name in names}
    return {"reward": spread_of([episode.reward for episode in valid]), **parts}


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for one in values for name in one})
    return {name: statistics.fmean(one.get(name, 0.0) for one in values) for name in names}


def _shown(groups: Mapping[int, Sequence[Episode]], count: int) -> list[SampleText]:
    deepest = max(len(group) for group in groups.values())
    turned = [group[i] for i in range(deepest) for group in groups.values() if i < len(group)]
    return [
        SampleText(
            episode_id=episode.id,
            group_id=episode.group_id,
            task_id=episode.task_id,
            prompt=episode.prompt,
            response=episode.response,
            reward=episode.reward,
            stop=episode.stop,
        )
        for episode in turned[:count]
    ]
