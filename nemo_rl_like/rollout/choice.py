"""Which episodes of a prompt become supervised examples: the best of n, or those above a reward (rejection sampling)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from nemo_rl_like.rollout.episode import CUT, Episode


@dataclass(frozen=True, slots=True)
class Rule:
    """What is kept of one prompt's episodes."""

    keep: int
    """Most episodes that are kept."""
    min_reward: float | None = None
    """Smallest reward; None: any."""
    keep_truncated: bool = False
    """Whether an episode that a limit cut may be kept."""
    rank: Callable[[Episode], float] = lambda episode: -episode.reward
    """Lowest first."""

    def allows(self, episode: Episode) -> bool:
        """Whether the episode may be kept at all."""
        if episode.invalid is not None or (episode.stop in CUT and not self.keep_truncated):
            return False
        return self.min_reward is None or episode.reward >= self.min_reward


@dataclass(frozen=True, slots=True)
class Counts:
    """What a number of prompts came to."""

    prompts: int = 0
    """Prompts asked."""
    prompts_kept: int = 0
    """Prompts of which at least one episode was kept."""
    samples: int = 0
    """Episodes."""
    invalid: int = 0
    """Episodes that could not be scored."""
    truncated: int = 0
    """Episodes that a limit cut."""
    kept: int = 0
    """Episodes kept."""
    tokens: int = 0
    """Sampled tokens of all episodes."""
    kept_tokens: int = 0
    """Sampled tokens of those that were kept."""
    reward_sum: float = 0.0
    """Over the valid episodes."""
    kept_reward_sum: float = 0.0
    """Over those that were kept."""

    def __add__(self, other: Counts) -> Counts:
        more = asdict(other)
        return Counts(**{name: value + more[name] for name, value in asdict(self).items()})

    def report(self) -> dict[str, float | None]:
        """Counts and means by name; a mean over nothing is null."""
        told = {name: value for name, value in asdict(self).items() if not name.endswith("reward_sum")}
        valid = self.samples - self.invalid
        return {
            **told,
            "reward_before": self.reward_sum / valid if valid else None,
            "reward_after": self.kept_reward_sum / self.kept if self.kept else None,
        }


def choose(group: Sequence[Episode], rule: Rule) -> list[Episode]:
    """The episodes of one prompt that the rule keeps, in its order: ties go to the lower sample, equal conversations count once."""
    ranked = sorted((e for e in group if rule.allows(e)), key=lambda e: (rule.rank(e), e.id))
    kept: dict[tuple[object, ...], Episode] = {}
    for episode in ranked:
        kept.setdefault(episode.messages, episode)
    return list(kept.values())[: rule.keep]


def counts_of(group: Sequence[Episode], kept: Sequence[Episode]) -> Counts:
    """The counts of one prompt."""
    return Counts(
        prompts=1,
        prompts_kept=int(bool(kept)),
        samples=len(group),
        invalid=sum(e.invalid is not None for e in group),
        truncated=sum(e.stop in CUT for e in group),
        kept=len(kept),
        tokens=sum(e.sampled_tokens for e in group),
        kept_tokens=sum(e.sampled_tokens for e in kept),
        reward_sum=sum(e.reward for e in group if e.invalid is None),
        kept_reward_sum=sum(e.reward for e in kept),
    )


def example_line(episode: Episode, sample: int) -> str:
    """One line of the dataset: the whole conversation, its reward, its task, and which sample of the task it is."""
    messages = [{"role": m.role, "content": m.content} for m in episode.messages]
    row = {"messages": messages, "reward": episode.reward, "task": episode.task_id, "sample": sample}
    return json.dumps(row, ensure_ascii=False)
