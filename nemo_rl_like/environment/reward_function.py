"""The beginner's path: `reward_func(prompts, responses, labels=None) -> list[float]` and a file of prompts, no class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.artifacts.references import load_function
from nemo_rl_like.environment.prompts import (
    PromptFileConfig,
    PromptFileSource,
    checked_rewards,
    labels_of,
    prompt_text,
    steps_of_rewards,
)
from nemo_rl_like.environment.types import Step, Task, Unscorable

CONTRACT = "reward_func(prompts, responses, labels=None) -> list[float]"
RewardFunction = Callable[..., object]


class RewardFunctionSource(PromptFileSource[PromptFileConfig]):
    """A single-turn environment made of a reward function and a file of prompts."""

    config_model = PromptFileConfig

    def __init__(self, config: PromptFileConfig, *, reward: str, prompts: str, label_key: str) -> None:
        super().__init__(config, prompts=prompts, label_key=label_key)
        self._name = reward
        self._function: RewardFunction = load_function(reward, "environment.reward")
        self._takes_labels = check_signature(self._function, reward, labelled=self.labelled)

    async def score(self, tasks: Sequence[Task], responses: Sequence[str]) -> Sequence[Step | Unscorable]:
        """Call the function once with the batch.

        `prompts` are the texts of the prompts' messages, `labels` the rows' labels (None if no row has one).
        Raises EnvironmentContractError if it does not return one number for each response.
        """
        prompts = [prompt_text(task) for task in tasks]
        if self._takes_labels:
            value = self._function(prompts, list(responses), labels=labels_of(tasks) if self.labelled else None)
        else:
            value = self._function(prompts, list(responses))
        return steps_of_rewards(checked_rewards(value, len(responses), self._name))


def check_signature(function: RewardFunction, name: str, *, labelled: bool) -> bool:
    """Whether the function takes `labels`. Raises SpecError if it cannot be called as the contract says."""
    if inspect.iscoroutinefunction(function):
        raise SpecError(f"environment.reward: {name} is a coroutine function; make it a plain `def` with {CONTRACT}")
    signature = inspect.signature(function)
    if _binds(signature, labels=None):
        return True
    if not _binds(signature):
        raise SpecError(f"environment.reward: {name}{signature} cannot be called as {CONTRACT}")
    if labelled:
        raise SpecError(
            f"environment.reward: the prompts have labels, but {name}{signature} has no parameter `labels`; add `labels=None`"
        )
    return False


def _binds(signature: inspect.Signature, **keywords: None) -> bool:
    try:
        signature.bind([], [], **keywords)
    except TypeError:
        return False
    return True
