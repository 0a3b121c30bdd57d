"""A remote scorer: POST {"prompts", "responses", "labels"}, answered by {"rewards": [...]}."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.environment.prompts import (
    PromptFileConfig,
    PromptFileSource,
    checked_rewards,
    labels_of,
    prompt_text,
    steps_of_rewards,
)
from nemo_rl_like.environment.types import EnvironmentContractError, Step, Task, Unscorable

log = logging.getLogger(__name__)


class RewardUrlConfig(PromptFileConfig):
    """How the scorer is called."""

    timeout_s: PositiveFloat = 8.0
    """Longest wait for one answer, in seconds."""
    retries: NonNegativeInt = 2
    """Further attempts after a connection error, a timeout or a 5xx answer."""
    backoff_s: NonNegativeFloat = 0.5
    """Pause before the first further attempt, in seconds; doubled each time."""

    def longest(self) -> float:
        """Longest time of all attempts and pauses, in seconds."""
        return float(self.timeout_s * (self.retries + 1) + self.backoff_s * (2**self.retries - 1))


class RewardUrlSource(PromptFileSource[RewardUrlConfig]):
    """A single-turn environment made of a remote scorer and a file of prompts."""

    config_model = RewardUrlConfig

    def __init__(
        self, config: RewardUrlConfig, *, url: str, prompts: str, label_key: str, step_timeout_s: float
    ) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise SpecError(f"environment.reward_url: {url!r} must start with http:// or https://")
        if config.longest() > step_timeout_s:
            raise SpecError(
                f"environment.step_timeout_s: {step_timeout_s} s is shorter than all attempts to reach reward_url "
                f"({config.longest():.1f} s from config.timeout_s, retries and backoff_s); raise it or lower these"
            )
        super().__init__(config, prompts=prompts, label_key=label_key)
        self._url = url

    async def score(self, tasks: Sequence[Task], responses: Sequence[str]) -> Sequence[Step | Unscorable]:
        """Ask the scorer for the batch. A scorer that cannot be reached makes the batch unscorable, not zero."""
        body = {
            "prompts": [prompt_text(task) for task in tasks],
            "responses": list(responses),
            "labels": labels_of(tasks) if self.labelled else None,
        }
        try:
            answer = await self._post(json.dumps(body).encode())
        except (OSError, http.client.HTTPException) as error:
            return [Unscorable("scorer_unreachable", f"{self._url}: {error}") for _ in responses]
        if not isinstance(answer, dict) or "rewards" not in answer:
            raise EnvironmentContractError(
                f'{self._url} answered without "rewards"; it must answer {{"rewards": [...]}}'
            )
        return steps_of_rewards(checked_rewards(answer["rewards"], len(responses), self._url))

    async def _post(self, body: bytes) -> object:
        for attempt in range(self.config.retries + 1):
            if attempt:
                await asyncio.sleep(self.config.backoff_s * 2 ** (attempt - 1))
            try:
                return await asyncio.to_thread(_post_once, self._url, body, self.config.timeout_s)
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise EnvironmentContractError(
                        f"{self._url} refused the request: HTTP {error.code} {error.reason}"
                    ) from error
                last: OSError | http.client.HTTPException = error
            except (OSError, http.client.HTTPException) as error:
                last = error
            log.warning("scorer %s: attempt %d of %d failed: %s", self._url, attempt + 1, self.config.retries + 1, last)
        raise last


def _post_once(url: str, body: bytes, timeout_s: float) -> object:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        text = answer.read()
    try:
        return json.loads(text)
    except ValueError as error:
        raise EnvironmentContractError(f"{url} answered {text[:80]!r}, which is not JSON") from error
