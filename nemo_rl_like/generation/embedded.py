"""`EmbeddedEngine`: decodes on the policy's own parameters, so there is no second copy and nothing to sync."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.artifacts import faults
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.sampler import draw, seeds_tensor, uniforms
from nemo_rl_like.generation.types import Completion, Request, Sampling, StopReason, SyncReport
from nemo_rl_like.model.decode import Decoder, SamplingDecoder
from nemo_rl_like.model.forward import MegatronModel, whole_sequences
from nemo_rl_like.model.lora import lengths_held
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.routes import Routes
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.tokens.routes import TokenRoutes
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle

logger = logging.getLogger(__name__)

_LEAVE_SHARE = 8
"""Finished rows leave the batch once they are one in this many; moving the cache for each one would cost more."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A prompt and some of its request's seeds."""

    request: int
    """Index of the request."""
    prompt: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """One sample being made."""

    request: int
    limit: int
    """Most tokens it may get."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None
    prompt_routes: TokenRoutes | None = None
    routes: list[Tensor] = field(default_factory=list)
    """int16 [width] of each token that was read."""

    def add(self, token: int, logprob: float, stops: frozenset[int]) -> None:
        """Take one more token, unless the sample has ended."""
        if self.stop is not None:
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in stops:
            self.stop = "stop"
        elif len(self.ids) == self.limit:
            self.stop = "length"

    def read(self, routes: Tensor) -> None:
        """Take the experts of its last token, unless the sample has ended."""
        if self.stop is None:
            self.routes.append(routes)

    @property
    def own_routes(self) -> TokenRoutes | None:
        """Those of its tokens; the last was never read."""
        if self.prompt_routes is None:
            return None
        nothing = TokenRoutes.none(self.prompt_routes.width, 0)
        return (TokenRoutes.of(torch.stack(self.routes)) if self.routes else nothing).padded(len(self.ids))


class EmbeddedEngine:
    """The engine on one rank of the policy group. All ranks make the same calls and get the same results.

    Args: `context` from the worker group; `model_handle`, this rank's model; `engine` from the spec (`max_batch_rows`,
    `max_context`); `record_routes`, whether completions tell the experts of their tokens. Data-parallel replicas share the requests. Weights are version 0 until `update_weights` says
    otherwise.
    """

    def __init__(
        self, context: RankContext, *, model_handle: MegatronModel, engine: EngineSpec, record_routes: bool = False
    ) -> None:
        before = () if model_handle.virtual_tokens is None else model_handle.virtual_tokens.ids
        limit = model_handle.shape.max_positions - len(before)
        self._max_context = min(engine.max_context or limit, limit)
        self._max_rows = engine.max_batch_rows
        self._models: tuple[MegatronModel, ...] = (model_handle,)
        self._decoder = Decoder(model_handle, _routes_of(model_handle) if record_routes else None)
        self._sampler: SamplingDecoder[Any] = self._decoder
        """What tokens are drawn from."""
        self._vocab_size = model_handle.shape.vocab_size
        self._version = 0
        logger.debug("embedded engine on rank %d of %s", context.rank, context.group)

    @property
    def version(self) -> int:
        """Version of the weights that it samples from."""
        return self._version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One list per request with one completion per seed. See `Engine.generate`."""
        for request in requests:
            self._check(request.request_id, request.prompt_ids)
        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = range(replica, len(requests), replicas)
        done: list[list[Completion]] = [[] for _ in requests]
        with self._whole_sequences():
            for wave in _waves([(i, requests[i]) for i in mine], self._max_rows):
                for row in self._decode(wave, sampling):
                    if row.stop is None:
                        raise RuntimeError(f"a sample of request {requests[row.request].request_id!r} did not end")
                    done[row.request].append(
                        Completion(
                            tuple(row.ids),
                            tuple(row.logprobs),
                            self._version,
                            row.stop,
                            row.prompt_routes,
                            row.own_routes,
                        )
                    )
        return done if replicas == 1 else _exchange(done, replicas)

    def score(self, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """For each row of n tokens, the log-probs of all but the first. See `Engine.score`."""
        for i, row in enumerate(rows):
            self._check(f"score {i}", row[:-1])
        with self._whole_sequences():
            flat = self._decoder.score(rows)
        lengths = [len(row) - 1 for row in rows]
        values = self._decoder.from_last_stage(flat, (sum(lengths),), torch.float32).split(lengths)
        return [value.tolist() for value in values]

    def update_weights(self, version: int, handle: SharedMemoryHandle | None) -> SyncReport:
        """Say which version the policy's parameters are now. There is nothing to read: `handle` must be None."""
        if handle is not None:
            raise ValueError(
                "the embedded engine decodes on the policy's own parameters and reads no published weights"
            )
        faults.point("sync.mid")
        self._version = version
        return SyncReport(version, {}, frozenset(), 0, 0.0)

    def sleep(self) -> None:
        """Nothing to give back: the cache lives only during `generate`."""

    def wake(self) -> None:
        """Undo `sleep`."""

    @contextmanager
    def _whole_sequences(self) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(whole_sequences(model))
                stack.enter_context(lengths_held(model))
            yield

    def _check(self, name: str, prompt: Sequence[int]) -> None:
        if not 0 < len(prompt) < self._max_context:
            raise InputError(
                f"request {name!r}: a prompt of {len(prompt)} tokens leaves no room in the context of "
                f"{self._max_context} (engine.max_context); shorten the prompt or raise the limit"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise InputError(f"request {name!r}: token ids must be in 0 .. {self._vocab_size - 1}; found {max(prompt)}")

    @torch.inference_mode()
    def _decode(self, wave: Sequence[_Group], sampling: Sampling) -> list[_Row]:
        """Decode the wave's groups to their ends, in lockstep."""
        rows = [
            _Row(group.request, min(sampling.max_new_tokens, self._max_context - len(group.prompt)))
            for group in wave
            for _ in group.seeds
        ]
        state, logits = self._sampler.prefill([g.prompt for g in wave], [len(g.seeds) for g in wave])
        if self._decoder.records:
            of_prompts = [TokenRoutes.of(routes) for routes in state.prompt_routes]
            for row, group in zip(rows, state.group_of_row.tolist(), strict=True):
                row.prompt_routes = of_prompts[group]
        if logits is not None:
            logits = logits.index_select(0, state.group_of_row)
        seeds = seeds_tensor([s for group in wave for s in group.seeds], state.group_of_row.device)
        live, position = list(rows), 0
        while True:
            tokens, logprobs = self._draw(logits, seeds, position, sampling)
            for row, token, logprob in zip(live, tokens.tolist(), logprobs.tolist(), strict=True):
                row.add(token, logprob, sampling.stops)
            keep = [i for i, row in enumerate(live) if row.stop is None]
            if not keep:
                return rows
            if (len(live) - len(keep)) * _LEAVE_SHARE >= len(live):
                state.keep(keep)
                index = torch.tensor(keep, device=tokens.device)
                live, tokens, seeds = [live[i] for i in keep], tokens[index], seeds[index]
            logits = self._sampler.step(state, tokens)
            if self._decoder.records:
                for row, read in zip(live, state.step_routes.cpu(), strict=True):
                    row.read(read)
            position += 1

    def _draw(self, logits: Tensor | None, seeds: Tensor, position: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Tokens int64 [R] and log-probs float32 [R], drawn on the last stage and the same everywhere."""
        tokens, logprobs = None, None
        if logits is not None:
            u = None if sampling.greedy else uniforms(seeds, torch.full_like(seeds, position))
            tokens, logprobs = draw(logits, u, sampling.logprob_temperature)
        shape = (seeds.numel(),)
        return (
            self._decoder.from_last_stage(tokens, shape, torch.int64),
            self._decoder.from_last_stage(logprobs, shape, torch.float32),
        )


def _routes_of(model: MegatronModel) -> Routes:
    if model.watch is None:
        raise InputError(f"a {model.shape.family} model has no experts to record; leave `policy.router.replay` out")
    return model.watch.routes


def _waves(requests: Sequence[tuple[int, Request]], max_rows: int) -> Iterator[list[_Group]]:
    """Whole prompts, in order, as many as fit in `max_rows` rows; only a prompt with more samples than that is cut."""
    wave: list[_Group] = []
    used = 0
    for index, request in requests:
        for first in range(0, len(request.seeds), max_rows):
            group = _Group(index, request.prompt_ids, request.seeds[first : first + max_rows])
            if used + len(group.seeds) > max_rows:
                yield wave
                wave, used = [], 0
            wave.append(group)
            used += len(group.seeds)
    if wave:
        yield wave


def _exchange(done: list[list[Completion]], replicas: int) -> list[list[Completion]]:
    """Every replica's completions, on every replica."""
    shares: list[list[list[Completion]] | None] = [None] * replicas
    dist.all_gather_object(shares, done, group=parallel_state.get_data_parallel_group())
    return [next((s[i] for s in shares if s is not None and s[i]), []) for i in range(len(done))]
