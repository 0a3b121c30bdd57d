"""What every engine takes and gives: requests, sampling, completions and the report of a weight update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nemo_rl_like.tokens.routes import TokenRoutes
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle

StopReason = Literal["stop", "length", "abort"]
"""`stop`: a stop token was sampled; `length`: a limit was reached; `abort`: the engine gave the request up."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. There are no filters (top-p, top-k, penalties): they would bias the log-probs."""

    temperature: float = 1.0
    """Divides the logits; > 0. Ignored when `greedy`."""
    max_new_tokens: int = 256
    """Longest completion, in tokens; the engine's context may end it earlier."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion; the engine knows no others (not even the model's end token)."""
    greedy: bool = False
    """Take the most likely token; log-probs are then at temperature 1."""
    ignore_stop: bool = False
    """Always make `max_new_tokens` tokens."""

    def __post_init__(self) -> None:
        if not self.greedy and not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}, must be > 0; use greedy=True for the most likely token"
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, must be at least 1")

    @property
    def logprob_temperature(self) -> float:
        """The temperature at which log-probs are reported: 1 when greedy."""
        return 1.0 if self.greedy else self.temperature

    @property
    def stops(self) -> frozenset[int]:
        """The ids that end a completion: none with `ignore_stop`."""
        return frozenset() if self.ignore_stop else frozenset(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its samples."""

    request_id: str
    """Unique among the requests in flight."""
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, at least one."""
    seeds: tuple[int, ...]
    """One sample per seed, any integers; a sample is a function of its seed and the model."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.request_id!r} has an empty prompt; give at least one token id")
        if not self.seeds:
            raise ValueError(f"request {self.request_id!r} has no seeds; give one per wanted sample")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample."""

    ids: tuple[int, ...]
    """Sampled token ids, with the stop token if one was sampled."""
    logprobs: tuple[float, ...]
    """Log-prob of each id under log-softmax(logits / temperature) over the whole vocabulary, in nats."""
    version: int
    """Version of the weights that sampled it."""
    stop: StopReason
    prompt_routes: TokenRoutes | None = None
    """Experts that the prompt's tokens were sent to; None: not recorded. The samples of a request share it."""
    routes: TokenRoutes | None = None
    """The same of `ids`; the last of them has no record, for the model never read it."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What an engine says after it took over new weights."""

    version: int
    """The version it now samples from."""
    checksums: dict[str, str]
    """sha256 of the bytes that the engine read, by Hugging Face name; empty if it uses the trainer's own parameters."""
    consumed: frozenset[str]
    """Hugging Face names whose tensors reached a parameter of the engine's model."""
    nbytes: int
    """Bytes read."""
    seconds: float
    """Wall time of the update, in seconds."""


class Engine(Protocol):
    """What samples from the policy."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One list per request with one completion per seed, in order.

        Raises InputError for a prompt that leaves no room in the engine's context. The embedded engine is collective:
        every rank calls it with the same arguments and gets the same result.
        """

    def score(self, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """For each row of n token ids, the n - 1 log-probs (nats, temperature 1) of its tokens but the first."""

    def update_weights(self, version: int, handle: SharedMemoryHandle | None) -> SyncReport:
        """Take over weights. Raises WeightSyncError naming what is missing, different or not consumed."""

    def sleep(self) -> None:
        """Give back what memory the engine can."""

    def wake(self) -> None:
        """Undo `sleep`."""
