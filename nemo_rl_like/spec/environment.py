"""The environment block: what asks and judges."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec


class EnvironmentSpec(Spec):
    """What asks and judges: a registered environment, or a reward function over a file of prompts."""

    name: str | None = None
    """Registered name, or `pkg.mod:Class`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own settings."""
    reward: str | None = None
    """`file.py:function` or `pkg.mod:function` with `reward_func(prompts, responses, labels=None) -> list[float]`."""
    reward_url: str | None = None
    """HTTP address of a scorer: POST {"prompts", "responses", "labels"} -> {"rewards"}."""
    prompts: str | None = None
    """JSONL file for `reward`/`reward_url`, or alone where a reward model judges: one {"messages": [{"role", "content"}], "label"?} or a list of messages a line."""
    label_key: str = "label"
    """Key of the label in a prompts row."""
    max_turns: PositiveInt = 8
    """Model turns in one episode."""
    step_timeout_s: PositiveFloat = 30.0
    """Longest time of one environment call, in seconds; then its process is killed and the sample is invalid."""
    processes: NonNegativeInt = 1
    """Killable processes that run environments; 0 = inside the rollout worker (no protection from hangs)."""
    max_invalid_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Stop the run when more than this fraction of a step's samples is invalid."""

    @model_validator(mode="after")
    def _one_source(self) -> EnvironmentSpec:
        given = [k for k in ("name", "reward", "reward_url") if getattr(self, k) is not None]
        if len(given) > 1 or (not given and self.prompts is None):
            raise ValueError(
                f"give exactly one of `name`, `reward` and `reward_url`; got {given or 'none'} (with `prompts` alone, `rl` needs a "
                "`reward_model`)"
            )
        if self.name is None and self.prompts is None:
            raise ValueError("`reward` and `reward_url` need `prompts`, a JSONL file")
        return self

    @property
    def scores(self) -> bool:
        """Whether it has a reward of its own."""
        return any(source is not None for source in (self.name, self.reward, self.reward_url))
