"""An episode while it runs: grows by what is sampled and what the environment says, token ids in and token ids out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_like.data.messages import Message, Tool
from nemo_rl_like.environment.types import Reset, Step, Task
from nemo_rl_like.generation.types import Completion
from nemo_rl_like.rollout.episode import Episode, Segment
from nemo_rl_like.rollout.seeds import environment_seed, sample_seed
from nemo_rl_like.tokens.routes import TokenRoutes


@dataclass(frozen=True, slots=True)
class Plan:
    """An episode before it starts."""

    episode_id: int
    """Unique in its step."""
    group_id: int
    """Index of the drawn prompt in its step."""
    sample: int
    """Index of the sample in its group."""
    task: Task
    """What to ask."""
    purpose: str
    """`train` or who else samples, or the name of an evaluation; part of every seed of tokens."""
    run_seed: int
    """Seed of the run."""
    step: int
    """Rollout step; part of every seed."""
    asked_as: str = ""
    """Purpose that the environment's seed is made of, so that another sampler is asked the same; empty: `purpose`."""

    def sample_seed(self, turn: int) -> int:
        """Seed of the tokens of a turn."""
        return sample_seed(self.purpose, self.run_seed, self.step, self.group_id, self.sample, turn)

    @property
    def environment_seed(self) -> int:
        """Seed of the environment."""
        return environment_seed(self.asked_as or self.purpose, self.run_seed, self.step, self.group_id)


@dataclass(slots=True)
class LiveSegment:
    """The tokens of one row so far."""

    tokens: list[int]
    prompt_len: int
    sampled: list[bool]
    behavior: list[float]
    version: list[int]
    turn: list[int]
    rewards: list[float]
    routes: TokenRoutes | None = None
    """Of the tokens up to the last sampled one; None: the engine records none."""

    @classmethod
    def of_prompt(cls, ids: Sequence[int]) -> LiveSegment:
        """A row that starts with a prompt."""
        count = len(ids)
        return cls(list(ids), count, [False] * count, [0.0] * count, [-1] * count, [-1] * count, [0.0] * count)

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], version: int, turn: int) -> None:
        """Append what the policy sampled in a turn."""
        self._add(ids, turn)
        self.sampled += [True] * len(ids)
        self.behavior += logprobs
        self.version += [version] * len(ids)

    def add_routes(self, before: TokenRoutes, sampled: TokenRoutes) -> None:
        """Take a turn's record of what it sampled, and of all tokens before, of which an earlier turn's record stays."""
        self.routes = (before if self.routes is None else self.routes.completed(before)) + sampled

    def add_environment(self, ids: Sequence[int]) -> None:
        """Append what the environment said; never trained."""
        self._add(ids, -1)
        self.sampled += [False] * len(ids)
        self.behavior += [0.0] * len(ids)
        self.version += [-1] * len(ids)

    def freeze(self) -> Segment:
        """The row as it is now."""
        return Segment(
            tokens=tuple(self.tokens),
            prompt_len=self.prompt_len,
            sampled=tuple(self.sampled),
            behavior=tuple(self.behavior),
            version=tuple(self.version),
            turn=tuple(self.turn),
            rewards=tuple(self.rewards),
            routes=None if self.routes is None else self.routes.padded(len(self.tokens)),
        )

    def _add(self, ids: Sequence[int], turn: int) -> None:
        self.tokens += ids
        self.turn += [turn] * len(ids)
        self.rewards += [0.0] * len(ids)


@dataclass(slots=True)
class LiveEpisode:
    """One running episode; `stop` is empty until it ends."""

    plan: Plan
    budget: int
    """Tokens it may still sample."""
    messages: list[Message] = field(default_factory=list)
    prompt_messages: int = 0
    tools: tuple[Tool, ...] = ()
    segments: list[LiveSegment] = field(default_factory=list)
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    turns: int = 0
    last: Completion | None = None
    stop: str = ""
    invalid: str | None = None
    detail: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The exact ids so far of the current segment: what the engine continues."""
        return tuple(self.segments[-1].tokens)

    def begin(self, reset: Reset, prompt_ids: Sequence[int]) -> None:
        """Take the environment's first messages."""
        self.messages = list(reset.messages)
        self.prompt_messages = len(reset.messages)
        self.tools = reset.tools
        self.new_segment(prompt_ids)

    def new_segment(self, prompt_ids: Sequence[int]) -> None:
        """Go on in a new row that starts with these ids."""
        self.segments.append(LiveSegment.of_prompt(prompt_ids))

    def take(self, completion: Completion, reply: Message) -> None:
        """Append what was sampled; `reply` is its text."""
        self.states.append(_state(self.messages))
        segment = self.segments[-1]
        segment.add_sampled(completion.ids, completion.logprobs, completion.version, self.turns)
        if completion.prompt_routes is not None and completion.routes is not None:
            segment.add_routes(completion.prompt_routes, completion.routes)
        self.messages.append(reply)
        self.budget -= len(completion.ids)
        self.turns += 1
        self.last = completion

    def score(self, step: Step) -> None:
        """Add a turn's rewards and metrics."""
        if step.reward is not None:
            self.reward = step.reward if self.reward is None else self.reward + step.reward
            self.segments[-1].rewards[-1] += step.reward
        _add(self.rewards, step.rewards)
        _add(self.metrics, step.metrics)

    def fail(self, reason: str, detail: str) -> None:
        """End the episode as invalid."""
        self.stop, self.invalid, self.detail = "invalid", reason, detail

    def freeze(self, placeholder: int) -> Episode:
        """The finished episode; one without a reward is invalid. `placeholder` is the only token of one that never began."""
        if self.invalid is None and self.reward is None:
            self.fail("no_reward", "no turn had a reward")
        valid = self.invalid is None
        segments = self.segments or [LiveSegment.of_prompt([placeholder])]
        return Episode(
            id=self.plan.episode_id,
            group_id=self.plan.group_id,
            task_id=self.plan.task.id,
            messages=tuple(self.messages),
            prompt_messages=self.prompt_messages,
            segments=tuple(segment.freeze() for segment in segments),
            reward=self.reward if valid and self.reward is not None else math.nan,
            rewards=dict(self.rewards) if valid else {},
            metrics=dict(self.metrics) if valid else {},
            states=tuple(self.states),
            stop=self.stop,
            turns=self.turns,
            invalid=self.invalid,
            detail=self.detail,
        )


def _state(messages: Sequence[Message]) -> str:
    """What the environment said last: the state from which a turn starts."""
    last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
    return hashlib.sha256("\n".join(f"{m.role}: {m.content}" for m in messages[last + 1 :]).encode()).hexdigest()


def _add(total: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        total[name] = total.get(name, 0.0) + value
