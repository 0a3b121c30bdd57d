"""`Episode`: what was asked, sampled and answered, token for token; and its rows in a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_like.data.messages import Message
from nemo_rl_like.tokens.batch import Row
from nemo_rl_like.tokens.routes import TokenRoutes

STOPS = ("stop", "length", "max_turns", "context", "truncated", "invalid")
"""Why an episode ended: the environment's end, the token limit, the turn limit, the context, cut by the environment, a failure."""
CUT = ("length", "context", "truncated", "max_turns")
"""Stops that cut an episode before its end."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of an episode that only grew at its end: one row."""

    tokens: tuple[int, ...]
    """Prompt, sampled and environment tokens."""
    prompt_len: int
    """Tokens before the first sampled one."""
    sampled: tuple[bool, ...]
    """[len(tokens)] true where the policy sampled the token."""
    behavior: tuple[float, ...]
    """[len(tokens)] the engine's log-prob of each sampled token, in nats; 0 elsewhere."""
    version: tuple[int, ...]
    """[len(tokens)] weight version of each sampled token; -1 elsewhere."""
    turn: tuple[int, ...]
    """[len(tokens)] turn that sampled the token, counted over the episode from 0; -1 elsewhere."""
    rewards: tuple[float, ...]
    """[len(tokens)] a turn's reward on its last sampled token; 0 elsewhere."""
    routes: TokenRoutes | None = None
    """[len(tokens)] experts that the engine sent the tokens to; None: not recorded."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    id: int
    """Unique in its step; rows carry it."""
    group_id: int
    """Episodes of one drawn prompt; equal prompts that were drawn twice stay two groups."""
    task_id: str
    """Task that was asked."""
    messages: tuple[Message, ...]
    """The whole conversation as text."""
    prompt_messages: int
    """How many of `messages` were asked before the first answer."""
    segments: tuple[Segment, ...]
    """At least one."""
    reward: float
    """Sum of the turns' rewards; NaN if invalid."""
    rewards: Mapping[str, float]
    """Parts of the reward by name, summed over turns."""
    metrics: Mapping[str, float]
    """The environment's further numbers, summed over turns."""
    states: tuple[str, ...]
    """[turns] hash of what the environment said before each turn."""
    stop: str
    """One of `STOPS`."""
    turns: int
    """Answers of the model."""
    invalid: str | None = None
    """Why the episode could not be scored, in a word; None if it could."""
    detail: str = ""
    """What happened, for the log."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens the policy sampled, over all turns."""
        return sum(sum(segment.sampled) for segment in self.segments)

    @property
    def response(self) -> str:
        """What was said after the prompt, for people."""
        said = self.messages[self.prompt_messages :]
        return "\n".join(m.content if m.role == "assistant" else f"[{m.role}] {m.content}" for m in said)

    @property
    def prompt(self) -> str:
        """What was asked, for people."""
        return "\n".join(m.content for m in self.messages[: self.prompt_messages])


def episode_rows(
    episodes: Sequence[Episode],
    greedy: Mapping[int, float] | None = None,
    opponents: Sequence[Episode] | None = None,
) -> list[Row]:
    """Rows in the order of episodes and segments. Rows of one group with equal prompt tokens share a `prompt_id`.

    An invalid episode's rows have an all-false loss mask and NaN rewards. `greedy`: reward of the greedy answer by group, a column;
    `opponents`: the episode that each is compared with, whose reward is a column.
    """
    prompt_ids: dict[tuple[int, tuple[int, ...]], int] = {}
    anchors: dict[tuple[int, str], int] = {}
    rows: list[Row] = []
    for index, episode in enumerate(episodes):
        valid = episode.invalid is None
        rewards = {**episode.rewards, "reward": episode.reward} if valid else {"reward": math.nan}
        columns = {"truncated": float(episode.stop in CUT)}
        if greedy is not None:
            columns["greedy"] = greedy[episode.group_id]
        if opponents is not None:
            columns["opponent"] = opponents[index].reward
        numbers = [anchors.setdefault((episode.group_id, state), len(anchors)) for state in episode.states]
        for segment in episode.segments:
            prompt = (episode.group_id, segment.tokens[: segment.prompt_len])
            rows.append(
                Row(
                    tokens=segment.tokens,
                    prompt_len=segment.prompt_len,
                    loss_mask=segment.sampled if valid else (False,) * len(segment.tokens),
                    behavior=segment.behavior,
                    version=segment.version,
                    prompt_id=prompt_ids.setdefault(prompt, len(prompt_ids)),
                    group_id=episode.group_id,
                    episode_id=episode.id,
                    valid=valid,
                    rewards=rewards,
                    routes=segment.routes,
                    columns=columns,
                    extras={
                        "turn": segment.turn,
                        "turn_rewards": segment.rewards,
                        "anchor": [numbers[turn] if turn >= 0 else -1 for turn in segment.turn],
                    },
                )
            )
    return rows
