"""What an environment is: authors write messages and rewards; tokens, masks, limits and deadlines belong to the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from nemo_rl_like.artifacts.errors import InputError, NrlError, SpecError
from nemo_rl_like.artifacts.redaction import redacted
from nemo_rl_like.data.messages import JSON, Message, Tool, assistant, user

__all__ = [
    "JSON",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentContractError",
    "EnvironmentSource",
    "InputError",
    "Message",
    "NoDemonstration",
    "Reset",
    "SingleTurnEnvironment",
    "SingleTurnSource",
    "SpecError",
    "Step",
    "Task",
    "Tool",
    "Unscorable",
    "assistant",
    "user",
]


class Unscorable(Exception):
    """The episode cannot be scored: it becomes invalid and is counted, it does not become zero."""

    def __init__(self, reason: str, detail: str = "") -> None:
        detail = redacted(detail)
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        """One word or two; metrics count by it."""
        self.detail = detail
        """What happened, for the log."""


class NoDemonstration(NrlError):
    """The environment has no right answer to show for supervised training."""

    exit_code = 2


class EnvironmentContractError(NrlError):
    """The environment or reward function broke its contract (wrong type or number of results): a bug that stops the run."""


class EnvironmentConfig(BaseModel):
    """Base of an environment's own settings; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to ask."""

    id: str
    """Unique in its split, and the same in every run."""
    data: Mapping[str, JSON] = field(default_factory=dict)
    """What the environment needs to ask and to judge."""


@dataclass(frozen=True, slots=True)
class Reset:
    """The start of an episode."""

    messages: tuple[Message, ...]
    """What the model reads first; at least one, the last one not the model's."""
    tools: tuple[Tool, ...] = ()
    """Tools shown by the chat template."""


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to one message of the model."""

    messages: tuple[Message, ...] = ()
    """What the model reads next; empty when the episode is over."""
    reward: float | None = None
    """Reward of this turn; None adds nothing. An episode whose turns are all None is invalid."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name, to be logged; not `reward`."""
    terminated: bool = False
    """The episode came to its end."""
    truncated: bool = False
    """The environment cut the episode short."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers to be logged."""

    def __post_init__(self) -> None:
        if "reward" in self.rewards:
            raise ValueError("`rewards` may not have the name `reward`: that is the sum over turns")
        if not (self.terminated or self.truncated or self.messages):
            raise ValueError("a step that does not end the episode needs at least one message")


class Environment(Protocol):
    """One episode at a time, over any number of turns."""

    async def reset(self, task: Task, seed: int) -> Reset:
        """Start an episode. The same task and seed give the same messages."""
        ...

    async def step(self, message: Message) -> Step:
        """Answer the model's message. Raises Unscorable when the episode cannot be judged."""
        ...

    async def close(self) -> None:
        """Let go of what the episode holds; called once, also after a failure."""
        ...


C = TypeVar("C", bound=EnvironmentConfig)


class EnvironmentSource(ABC, Generic[C]):
    """What a registry name resolves to: tasks by split, and environments to run them in.

    The constructor takes the validated `config_model` and must be deterministic: it runs once in the rollout worker and once in
    each environment process.
    """

    config_model: ClassVar[type[EnvironmentConfig]]
    """Model of `environment.config`."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of `train`, `validation` or `test`: deterministic, and disjoint by content."""

    @abstractmethod
    def make(self) -> Environment:
        """An environment for one episode."""

    def demonstration(self, task: Task, epoch: int = 0) -> str:
        """One right answer to the task, for supervised training; `epoch` seeds label noise where there is any.

        Raises NoDemonstration when there is none.
        """
        raise NoDemonstration(
            f"{type(self).__name__} has no demonstrations; give the `sft` stage a `data.path` instead of `environment_demonstrations`"
        )


class SingleTurnSource(EnvironmentSource[C]):
    """A source whose episodes have one turn. The framework scores a whole batch of answers with one call.

    Each answer must be scored on its own merits: the batch is cut over processes, and after a crash or a timeout the answers are
    scored one at a time to find the one that caused it.
    """

    @abstractmethod
    def prompt(self, task: Task) -> Reset:
        """What is asked."""

    @abstractmethod
    async def score(self, tasks: Sequence[Task], responses: Sequence[str]) -> Sequence[Step | Unscorable]:
        """One result for each answer, in order; `Unscorable` for one that cannot be judged."""

    def make(self) -> Environment:
        """The same as a one-turn episode."""
        return SingleTurnEnvironment(self)


class SingleTurnEnvironment:
    """A `SingleTurnSource` behind the interface of an environment."""

    def __init__(self, source: SingleTurnSource[C]) -> None:
        self._source = source
        self._task: Task | None = None

    async def reset(self, task: Task, seed: int) -> Reset:
        """Ask the task's question."""
        self._task = task
        return self._source.prompt(task)

    async def step(self, message: Message) -> Step:
        """Score the answer. Raises Unscorable."""
        if self._task is None:
            raise EnvironmentContractError("`step` was called before `reset`")
        (result,) = await self._source.score([self._task], [message.content])
        if isinstance(result, Unscorable):
            raise result
        return result

    async def close(self) -> None:
        """Nothing to let go of."""
