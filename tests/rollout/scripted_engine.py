"""A scripted engine: obeys the engine's contract without a model, so that what it samples is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.generation.types import Completion, Request, Sampling

Script = Callable[[tuple[int, ...], int], Sequence[int]]
"""(prompt ids, seed) -> the ids that would be sampled without any limit."""


@dataclass
class ScriptedEngine:
    """Samples what the script says; a sample depends on its prompt and seed only."""

    script: Script
    max_context: int = 256
    version: int = 0
    calls: list[list[Request]] = field(default_factory=list)
    """The requests of each call."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """As the engine's contract says."""
        self.calls.append(list(requests))
        return [[self._sample(request.prompt_ids, seed, sampling) for seed in request.seeds] for request in requests]

    def _sample(self, prompt: tuple[int, ...], seed: int, sampling: Sampling) -> Completion:
        room = min(sampling.max_new_tokens, self.max_context - len(prompt))
        if room < 1:
            raise InputError(f"a prompt of {len(prompt)} tokens leaves no room in {self.max_context}")
        ids = list(self.script(prompt, 0 if sampling.greedy else seed))
        for i, token in enumerate(ids[:room]):
            if token in sampling.stops:
                return self._completion(prompt, ids[: i + 1], "stop")
        if len(ids) < room:
            raise AssertionError(f"the script made {len(ids)} tokens without a stop, but {room} were asked for")
        return self._completion(prompt, ids[:room], "length")

    def _completion(self, prompt: tuple[int, ...], ids: Sequence[int], stop: str) -> Completion:
        logprobs = tuple(-1.0 - token / 100 - len(prompt) / 1000 for token in ids)
        return Completion(ids=tuple(ids), logprobs=logprobs, version=self.version, stop=stop)


def random_script(vocabulary: Sequence[int], stop: int, stop_probability: float = 0.2) -> Script:
    """Random tokens, each a function of seed and prompt length; stops now and then, at the latest after 500."""

    def script(prompt: tuple[int, ...], seed: int) -> list[int]:
        draw = random.Random(f"{seed}:{len(prompt)}:{sum(prompt)}")
        ids = []
        while len(ids) < 500:
            ids.append(stop if draw.random() < stop_probability else draw.choice(vocabulary))
        return [*ids, stop]

    return script
