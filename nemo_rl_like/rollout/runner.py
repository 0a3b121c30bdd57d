"""Runs episodes in waves: everyone who is alive samples together, then everyone is answered together.

A wave waits until each live episode has ended or wants tokens, and goes in the order of episode ids. So neither the result nor the
engine's batches depend on which environment answers first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from nemo_rl_like.artifacts import faults
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.environment.types import Step, Unscorable
from nemo_rl_like.generation.types import Completion, Request, Sampling
from nemo_rl_like.rollout.dialogue import Dialogue
from nemo_rl_like.rollout.episode import Episode
from nemo_rl_like.rollout.live import LiveEpisode, Plan

log = logging.getLogger(__name__)


class Generator(Protocol):
    """The part of an engine that rollouts use."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One list per request with one completion per seed, in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an episode."""

    max_turns: int
    """Answers of the model."""
    max_new_tokens: int
    """Sampled tokens over all turns."""
    max_context: int
    """Tokens of one row: prompt, sampled and environment tokens."""


class Timing:
    """Wall time by part, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"generate": 0.0, "environment": 0.0}
        """Summed so far."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class EpisodeRunner:
    """Runs planned episodes to their end."""

    def __init__(self, dialogue: Dialogue, renderer: Renderer, engine: Generator, limits: Limits) -> None:
        self._dialogue = dialogue
        self._renderer = renderer
        self._engine = engine
        self._limits = limits
        self.timing = Timing()
        """Where the time went so far."""

    def run(self, plans: Sequence[Plan], sampling: Sampling) -> list[Episode]:
        """The finished episodes, in the order of the plans, which must be that of their ids.

        `sampling.max_new_tokens` is overruled by the limits.

        Raises:
            InputError: a prompt leaves no room for an answer, or cannot be rendered; names the task.
            EnvironmentContractError: the environment returned something else than its interface asks for.
        """
        live = [LiveEpisode(plan, budget=self._limits.max_new_tokens) for plan in plans]
        self._open(live)
        while wave := [episode for episode in live if not episode.stop]:
            self._generate(wave, sampling)
            faults.point("episode.mid")
            self._answer([episode for episode in wave if not episode.stop])
        with self.timing.part("environment"):
            self._dialogue.drop(plans)
        placeholder = self._renderer.stop_ids[0]
        return [episode.freeze(placeholder) for episode in live]

    def _open(self, live: Sequence[LiveEpisode]) -> None:
        with self.timing.part("environment"):
            resets = self._dialogue.open([episode.plan for episode in live])
        for episode, reset in zip(live, resets, strict=True):
            if isinstance(reset, Unscorable):
                episode.fail(reset.reason, reset.detail)
                continue
            try:
                ids = self._renderer.prompt_ids(reset.messages, reset.tools)
            except InputError as error:
                raise InputError(f"task {episode.plan.task.id}: {error}") from error
            check_prompt_length(episode.plan.task.id, len(ids), self._limits.max_context)
            episode.begin(reset, ids)

    def _generate(self, wave: Sequence[LiveEpisode], sampling: Sampling) -> None:
        members = _requests_of(wave)
        requests = [
            Request(
                request_id=f"{first.plan.purpose}-{first.plan.step}-{first.plan.episode_id}-{first.turns}",
                prompt_ids=first.tokens,
                seeds=tuple(episode.plan.sample_seed(episode.turns) for episode in same),
            )
            for same in members
            for first in same[:1]
        ]
        longest = max(episode.budget for episode in wave)
        with self.timing.part("generate"):
            answers = self._engine.generate(requests, replace(sampling, max_new_tokens=longest))
        for same, completions in zip(members, answers, strict=True):
            for episode, completion in zip(same, completions, strict=True):
                self._take(episode, completion)

    def _take(self, episode: LiveEpisode, completion: Completion) -> None:
        if completion.stop == "abort" or not completion.ids:
            episode.fail(
                "aborted", f"the engine ended the request with `{completion.stop}` after {len(completion.ids)} tokens"
            )
            return
        kept = within(completion, episode.budget)
        episode.take(kept, self._renderer.reply(kept.ids))

    def _answer(self, wave: Sequence[LiveEpisode]) -> None:
        with self.timing.part("environment"):
            answers = self._dialogue.step([(episode.plan, episode.messages[-1]) for episode in wave])
        for episode, answer in zip(wave, answers, strict=True):
            if isinstance(answer, Unscorable):
                log.warning("task %s, episode %d is invalid: %s", episode.plan.task.id, episode.plan.episode_id, answer)
                episode.fail(answer.reason, answer.detail)
                continue
            episode.score(answer)
            episode.stop = self._stop_reason(episode, answer)
            if not episode.stop:
                self._next_turn(episode, answer)

    def _stop_reason(self, episode: LiveEpisode, answer: Step) -> str:
        if episode.last is not None and episode.last.stop == "length":
            return "length" if episode.budget <= 0 else "context"
        if answer.terminated:
            return "stop"
        if answer.truncated:
            return "truncated"
        if episode.turns >= self._limits.max_turns:
            return "max_turns"
        return "length" if episode.budget <= 0 else ""

    def _next_turn(self, episode: LiveEpisode, answer: Step) -> None:
        """Append the environment's messages, in a new segment if the template does not simply append."""
        before, reply = episode.messages[:-1], episode.messages[-1]
        try:
            ids = self._renderer.next_turn_ids(before, reply, episode.tokens, answer.messages, episode.tools)
            if ids is None:
                fresh = self._renderer.prompt_ids([*episode.messages, *answer.messages], episode.tools)
        except InputError as error:
            episode.fail("render", str(error))
            return
        length = len(fresh) if ids is None else len(episode.tokens) + len(ids)
        if length >= self._limits.max_context:
            episode.stop = "context"
            return
        episode.messages += answer.messages
        if ids is None:
            episode.new_segment(fresh)
        else:
            episode.segments[-1].add_environment(ids)


def within(completion: Completion, budget: int) -> Completion:
    """The completion cut to its episode's remaining tokens: exactly what sampling with that limit gives."""
    if len(completion.ids) <= budget:
        return completion
    routes = None if completion.routes is None else completion.routes.first(budget - 1).padded(budget)
    ids, logprobs = completion.ids[:budget], completion.logprobs[:budget]
    return replace(completion, ids=ids, logprobs=logprobs, stop="length", routes=routes)


def check_prompt_length(task_id: str, tokens: int, max_context: int) -> None:
    """Raises InputError when a prompt leaves no room for an answer."""
    if tokens >= max_context:
        raise InputError(
            f"task {task_id}: the prompt has {tokens} tokens, but the context is {max_context} and at least one must be left for the "
            "answer; shorten the prompt, or raise `engine.max_context` or the model's `max_positions`"
        )


def _requests_of(wave: Sequence[LiveEpisode]) -> list[list[LiveEpisode]]:
    """Episodes that share a request: same group, same ids so far."""
    members: dict[tuple[int, tuple[int, ...]], list[LiveEpisode]] = {}
    for episode in wave:
        members.setdefault((episode.plan.group_id, episode.tokens), []).append(episode)
    return list(members.values())
