"""Decoding on a Megatron model's own parameters: a prompt is computed once for its samples, and rows leave when done.

The layers are the training forward's (`MegatronModel.run_stage`), so tensor-parallel sums, norms and heads are the same
code; only attention is different, through layouts that keep and read a cache of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model import runtime
from nemo_rl_like.model.attention import AttentionLayout
from nemo_rl_like.model.attention_layouts import PackedLayout
from nemo_rl_like.model.attention_rows import cap_scores
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.heads import OutputHead, full_logits, output_head, token_logprobs
from nemo_rl_like.model.hf_attention import PLAIN, Scores
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.routes import Routes

_PREFILL_TOKENS = 8192
"""Prompt tokens of one pass, in tokens; one longer prompt still makes a pass of its own."""
_SCORE_CHUNK = 1024
_GROWTH = 32
"""Own tokens for which the cache has room at first; doubled when full."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where the R live rows stand: G prompts, each with K places for its samples."""

    groups: int
    width: int
    places: Tensor | None
    """int64 [R] place (group * width + column) of each row; None: every place is taken, in order."""

    @classmethod
    def of(cls, group_of_row: Tensor) -> _Grid:
        """The grid of rows sorted by group, `group_of_row` int64 [R] counting 0 .. G - 1 without gaps."""
        counts = torch.bincount(group_of_row)
        groups, width = counts.numel(), int(counts.max())
        if groups * width == group_of_row.numel():
            return cls(groups, width, None)
        first = torch.cumsum(counts, 0) - counts
        column = torch.arange(group_of_row.numel(), device=group_of_row.device) - first[group_of_row]
        return cls(groups, width, group_of_row * width + column)

    def spread(self, rows: Tensor) -> Tensor:
        """[R, kv, ...] -> [G, kv, K, ...]; empty places are zero."""
        if self.places is not None:
            whole = rows.new_zeros(self.groups * self.width, *rows.shape[1:])
            rows = whole.index_copy_(0, self.places, rows)
        return rows.unflatten(0, (self.groups, self.width)).transpose(1, 2)

    def collect(self, places: Tensor) -> Tensor:
        """[G, kv, K, n, d] -> [R, kv * n * d]."""
        flat = places.transpose(1, 2).flatten(2).flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)

    def at(self, rows: Tensor) -> Tensor:
        """int64: places of the given row indices."""
        return rows if self.places is None else self.places.index_select(0, rows)


@dataclass(slots=True)
class _LayerCache:
    """Keys and values of one layer; this rank's heads, rotated."""

    prompt_keys: Tensor
    """[G, kv, P, d], shared by a prompt's samples."""
    prompt_values: Tensor
    own_keys: Tensor
    """[G, kv, K, capacity, d], each sample's own tokens."""
    own_values: Tensor

    def append(self, grid: _Grid, step: int, key: Tensor, value: Tensor) -> None:
        """Put own token number `step` of every row, [R, kv, d] each."""
        if step == self.own_keys.shape[3]:
            self.own_keys = functional.pad(self.own_keys, (0, 0, 0, step))
            self.own_values = functional.pad(self.own_values, (0, 0, 0, step))
        self.own_keys.select(3, step).copy_(grid.spread(key))
        self.own_values.select(3, step).copy_(grid.spread(value))

    def select(self, groups: Tensor, old_places: Tensor, new: _Grid) -> None:
        """Keep these groups, and the rows at `old_places` on the grid `new`."""
        if groups.numel() < self.prompt_keys.shape[0]:
            self.prompt_keys = self.prompt_keys.index_select(0, groups)
            self.prompt_values = self.prompt_values.index_select(0, groups)
        self.own_keys = _moved(self.own_keys, old_places, new)
        self.own_values = _moved(self.own_values, old_places, new)


def _moved(own: Tensor, old_places: Tensor, new: _Grid) -> Tensor:
    rows = own.transpose(1, 2).flatten(0, 1).index_select(0, old_places)
    return new.spread(rows).contiguous()


@dataclass(frozen=True, slots=True)
class _PrefillLayout:
    """Prompts end to end, each attending causally to itself; keeps every layer's keys and values."""

    packed: PackedLayout
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Layer number -> keys and values [tokens, kv, d]."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `AttentionLayout`."""
        self.kept[layer] = (key.squeeze(1), value.squeeze(1))
        return self.packed.attend(layer, query, key, value, scores)

    def to(self, device: torch.device, dtype: torch.dtype) -> _PrefillLayout:
        """See `AttentionLayout`."""
        return replace(self, packed=self.packed.to(device, dtype))


@dataclass(frozen=True, slots=True)
class _StepLayout:
    """One token a row, attending to its prompt and to the row's own tokens."""

    caches: dict[int, _LayerCache]
    grid: _Grid
    step: int
    """Own tokens before this one."""
    hidden_prompt: Tensor | None
    """bool [G, 1, 1, P] true behind a prompt's end; None: prompts of one length."""
    prompt_lengths: Tensor
    """int64 [G]"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """softmax(cap(scale q [k_prompt, k_own]^T)) [v_prompt, v_own]; a prompt's samples share one product with it."""
        cache, length = self.caches[layer], self.step + 1
        cache.append(self.grid, self.step, key.squeeze(1), value.squeeze(1))
        rows, heads, width = query.shape[0], query.shape[2], query.shape[3]
        kv = key.shape[2]
        scale = 1 / math.sqrt(width) if scores.scale is None else scores.scale
        scaled = (query * scale).view(rows, kv, heads // kv, width)
        q = self.grid.spread(scaled)  # [G, kv, K, n, d]
        groups, _, samples, share, _ = q.shape
        q = q.reshape(groups * kv, samples * share, width).contiguous()
        prompt_keys, prompt_values = cache.prompt_keys.flatten(0, 1), cache.prompt_values.flatten(0, 1)
        first = 0 if scores.window is None else max(0, length - scores.window)
        own_keys = cache.own_keys.flatten(0, 2)[:, first:length]
        own_values = cache.own_values.flatten(0, 2)[:, first:length]
        on_prompt = torch.bmm(q, prompt_keys.transpose(1, 2))
        on_own = torch.bmm(q.view(-1, share, width), own_keys.transpose(1, 2)).view(
            *on_prompt.shape[:2], length - first
        )
        if scores.cap is not None:
            on_prompt, on_own = (cap_scores(x, scores.cap) for x in (on_prompt, on_own))
        hidden = self._hidden(scores.window, on_prompt.shape[2])
        if hidden is not None:
            on_prompt.view(groups, kv, samples * share, -1).masked_fill_(hidden, float("-inf"))
        on_all = [on_prompt, on_own]
        if scores.sinks is not None:
            sinks = scores.sinks.view(1, kv, 1, share).expand(groups, -1, samples, -1)
            on_all.append(sinks.reshape(groups * kv, samples * share, 1).to(on_own.dtype))
        weights = torch.cat(on_all, dim=2).softmax(dim=2, dtype=torch.float32).to(query.dtype)
        prompt_tokens = on_prompt.shape[2]
        out = torch.bmm(weights[:, :, :prompt_tokens], prompt_values).view(-1, share, width)
        own = weights.view(-1, share, weights.shape[2])[:, :, prompt_tokens : prompt_tokens + length - first]
        out = torch.baddbmm(out, own, own_values).view(groups, kv, samples, share, width)
        return self.grid.collect(out).unsqueeze(1)

    def _hidden(self, window: int | None, longest: int) -> Tensor | None:
        """bool [G, 1, 1, longest] which places of prompts this step's tokens do not attend to; None: to all."""
        if window is None or window > longest + self.step:
            return self.hidden_prompt
        columns = torch.arange(longest, device=self.prompt_lengths.device)
        before = (columns <= self.prompt_lengths[:, None] + (self.step - window))[:, None, None, :]
        return before if self.hidden_prompt is None else before | self.hidden_prompt

    def to(self, device: torch.device, dtype: torch.dtype) -> _StepLayout:
        """See `AttentionLayout`; everything is on the model's device already."""
        return self


class DecodeState:
    """The cache of the rows that are being decoded: row r is a sample of prompt `group_of_row[r]`."""

    def __init__(self, prompt_lengths: Tensor, group_of_row: Tensor) -> None:
        """`prompt_lengths` int64 [G]; `group_of_row` int64 [R], sorted."""
        self._lengths = prompt_lengths
        self._group_of_row = group_of_row
        self._grid = _Grid.of(group_of_row)
        self._caches: dict[int, _LayerCache] = {}
        self._step = 0
        self.prompt_routes: list[Tensor] = []
        """int16 [tokens, width] of each prompt, see `tokens.routes.ROUTES`; empty where the decoder records none."""
        self.step_routes: Tensor | None = None
        """int16 [R, width] of the tokens that the last step read."""

    @property
    def rows(self) -> int:
        """Live rows."""
        return self._group_of_row.numel()

    @property
    def group_of_row(self) -> Tensor:
        """int64 [R] index of each row's prompt among the live ones."""
        return self._group_of_row

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only (indices of live rows, ascending); a prompt without rows leaves too."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._group_of_row.device)
        groups, renumbered = torch.unique(self._group_of_row[index], return_inverse=True)
        old_places, new = self._grid.at(index), _Grid.of(renumbered)
        for cache in self._caches.values():
            cache.select(groups, old_places, new)
        self._lengths, self._group_of_row, self._grid = self._lengths[groups], renumbered, new

    def add_prompts(self, kept: dict[int, tuple[Tensor, Tensor]], groups: Sequence[int], starts: Sequence[int]) -> None:
        """Take over keys and values [tokens, kv, d] of prompts `groups`, which start at tokens `starts`."""
        device = self._lengths.device
        longest = int(self._lengths.max())
        column = torch.arange(longest, device=device)
        rows = torch.tensor(groups, device=device)
        last = self._lengths[rows][:, None] - 1
        index = (torch.tensor(starts, device=device)[:, None] + torch.minimum(column, last)).flatten()
        for layer, tensors in kept.items():
            cache = self._caches.get(layer) or self._new_cache(tensors[0], longest)
            self._caches[layer] = cache
            for mine, theirs in zip((cache.prompt_keys, cache.prompt_values), tensors, strict=True):
                mine[rows] = theirs.index_select(0, index).unflatten(0, (len(groups), longest)).transpose(1, 2)

    def _new_cache(self, like: Tensor, longest: int) -> _LayerCache:
        _, kv, width = like.shape
        prompt = (self._lengths.numel(), kv, longest, width)
        own = (self._grid.groups, kv, self._grid.width, _GROWTH, width)
        return _LayerCache(like.new_empty(prompt), like.new_empty(prompt), like.new_zeros(own), like.new_zeros(own))

    def next_layout(self) -> tuple[_StepLayout, Tensor]:
        """The layout of the next step and the position of each row's token, int64 [R]; counts the step."""
        longest = self._caches_width()
        hidden = None
        if bool((self._lengths != longest).any()):
            columns = torch.arange(longest, device=self._lengths.device)
            hidden = (columns >= self._lengths[:, None])[:, None, None, :]
        layout = _StepLayout(self._caches, self._grid, self._step, hidden, self._lengths)
        positions = self._lengths[self._group_of_row] + self._step
        self._step += 1
        return layout, positions

    def _caches_width(self) -> int:
        return next(iter(self._caches.values())).prompt_keys.shape[2]


class LiveRows(Protocol):
    """What a decoder keeps of the rows that are being decoded."""

    @property
    def group_of_row(self) -> Tensor:
        """int64 [R] index of each row's prompt among the live ones."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only (indices of live rows, ascending)."""
        ...


S = TypeVar("S", bound=LiveRows)


class SamplingDecoder(Protocol[S]):
    """What sampling needs of a decoder; see `Decoder`."""

    def prefill(self, prompts: Sequence[Sequence[int]], samples: Sequence[int]) -> tuple[S, Tensor | None]:
        """The state of sum(samples) rows, and float32 [G, V] logits of each prompt's next token."""
        ...

    def step(self, state: S, tokens: Tensor) -> Tensor | None:
        """Append one token to each live row; float32 [R, V] logits of the token after it."""
        ...


class Decoder:
    """Prefill and decode steps of one model replica. Every rank of the replica (tp x pp) calls the same methods alike.

    Logits come out on the last pipeline stage, the same on each tensor-parallel rank; the other stages get None.
    """

    def __init__(self, model: MegatronModel, routes: Routes | None = None) -> None:
        """`routes`: those of the model, where the experts of each token are recorded."""
        self._model, self._routes = model, routes
        self._device = runtime.device()
        self._group = parallel_state.get_pipeline_model_parallel_group()

    @property
    def records(self) -> bool:
        """Whether it records the experts of each token."""
        return self._routes is not None

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output head."""
        return self._model.has_head

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], samples: Sequence[int]) -> tuple[DecodeState, Tensor | None]:
        """Compute each prompt once. `samples[g]` rows will continue prompt g (at least 1 each).

        Returns the state of sum(samples) rows, sorted by prompt, and float32 [G, V] logits of each prompt's next token.
        """
        prompts = [(*self._before, *prompt) for prompt in prompts]
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        state = DecodeState(lengths, torch.repeat_interleave(torch.tensor(samples)).to(self._device))
        logits: Tensor | None = None
        found_routes: dict[int, Tensor] = {}
        for part in _passes([len(p) for p in prompts]):
            starts, hidden, kept, routes = self._run_rows([prompts[g] for g in part])
            state.add_prompts(kept, part, starts)
            if routes is not None:
                found_routes |= zip(part, routes.split([len(prompts[g]) for g in part]), strict=True)
            if hidden is None:
                continue
            last = torch.tensor(
                [s + len(prompts[g]) - 1 for s, g in zip(starts, part, strict=True)], device=self._device
            )
            found = full_logits(hidden.index_select(0, last), self._head())
            if logits is None:
                logits = found.new_empty(len(prompts), found.shape[1])
            logits[torch.tensor(part, device=self._device)] = found
        state.prompt_routes = [found_routes[g] for g in sorted(found_routes)]
        return state, logits

    @torch.inference_mode()
    def step(self, state: DecodeState, tokens: Tensor) -> Tensor | None:
        """Append one token to each live row, int64 [R]; returns float32 [R, V] logits of the token after it."""
        layout, positions = state.next_layout()
        hidden, state.step_routes = self._stage(tokens[None].to(self._device), positions[None], layout)
        return None if hidden is None else full_logits(hidden, self._head())

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """float32 [sum(len - 1)] log-probs (temperature 1) of every token but each row's first, rows end to end."""
        found: dict[int, Tensor] = {}
        before = self._before
        for part in _passes([len(before) + len(row) for row in rows]):
            starts, hidden, _, _ = self._run_rows([(*before, *rows[i]) for i in part])
            if hidden is None:
                continue
            for start, i in zip(starts, part, strict=True):
                targets = torch.tensor(list(rows[i][1:]), dtype=torch.int64, device=self._device)
                mine = hidden[start + len(before) : start + len(before) + len(rows[i]) - 1]
                out = token_logprobs(mine, self._head(), targets, temperature=1.0, chunk_tokens=_SCORE_CHUNK)
                found[i] = out.logprobs
        return torch.cat([found[i] for i in range(len(rows))]) if self.is_last_stage else None

    @torch.inference_mode()
    def keys_and_values(self, row: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Of the row's tokens, [tokens, kv_heads, d] each, by number of this stage's layers; this rank's heads, keys rotated."""
        return self._run_rows([row])[2]

    def from_last_stage(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The last pipeline stage's `tensor`, on every stage."""
        if self._group.size() == 1 and tensor is not None:
            return tensor
        shared = tensor.contiguous() if tensor is not None else torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(shared, parallel_state.get_pipeline_model_parallel_last_rank(), group=self._group)
        return shared

    @property
    def _before(self) -> tuple[int, ...]:
        """Virtual tokens before each row."""
        return () if self._model.virtual_tokens is None else self._model.virtual_tokens.ids

    def _head(self) -> OutputHead:
        return output_head(self._model)

    def _run_rows(
        self, rows: Sequence[Sequence[int]]
    ) -> tuple[list[int], Tensor | None, dict[int, tuple[Tensor, Tensor]], Tensor | None]:
        """One pass over rows end to end: where each starts, hidden states [tokens, H] (last stage), keys and values, and what is recorded of
        the tokens' experts, [tokens, width]."""
        lengths = [len(row) for row in rows]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        ids = torch.tensor([[token for row in rows for token in row]], device=self._device)
        positions = torch.tensor([[i for n in lengths for i in range(n)]], device=self._device)
        layout = _PrefillLayout(PackedLayout.of(lengths)).to(self._device, self._model.dtype)
        hidden, routes = self._stage(ids, positions, layout)
        return starts, hidden, layout.kept, routes

    def _stage(self, ids: Tensor, positions: Tensor, layout: AttentionLayout) -> tuple[Tensor | None, Tensor | None]:
        """See `_run_stages`; and what is recorded of the tokens' experts, [s, width], on every stage."""
        if self._routes is None:
            return self._run_stages(ids, positions, layout), None
        with self._routes.taking(ids.shape[1], self._device) as taken:
            hidden = self._run_stages(ids, positions, layout)
        if self._group.size() > 1:  # each entry is one stage's, and 0 on the others; gloo and NCCL know no int16
            dist.all_reduce(taken.view(torch.uint8), group=self._group)
        return hidden, taken

    def _run_stages(self, ids: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor | None:
        """This rank's stages of a pass over tokens [1, s]; [s, H] where the head is, otherwise handed on."""
        model = self._model
        hidden: Tensor | None = None
        for stage in model.stages:
            if not stage.pre_process:
                incoming = torch.empty(ids.shape[1], 1, model.shape.hidden_size, dtype=model.dtype, device=self._device)
                dist.recv(incoming, parallel_state.get_pipeline_model_parallel_prev_rank(), group=self._group)
                stage.set_input_tensor(incoming)
            out: Tensor = stage.run_stage(ids, positions, layout)
            if stage.post_process:
                hidden = out[:, 0]
            else:
                dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank(), group=self._group)
        return hidden


def _passes(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of rows by length, cut into passes of at most `_PREFILL_TOKENS` tokens."""
    part: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if part and sum(lengths[i] for i in part) + lengths[index] > _PREFILL_TOKENS:
            yield part
            part = []
        part.append(index)
    if part:
        yield part
