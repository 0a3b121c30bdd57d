"""Rows of a `TokenBatch` -> `MicroBatch`es: what one forward pass eats, on every data-parallel rank the same number of times.

Only what a scored token needs is computed: a row ends before its last scored token (nothing is predicted by it), and a row without
scored tokens is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nemo_rl_like.model.attention import AttentionLayout
from nemo_rl_like.model.attention_layouts import (
    CausalLayout,
    PackedLayout,
    PrefixBlock,
    SharedPrefixLayout,
    similar_lengths,
)
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.packing import Rooms, Unit, deal, merged
from nemo_rl_like.model.row_places import RowPlaces
from nemo_rl_like.tokens.batch import TokenBatch

Kind = Literal["padded", "packed", "shared_prefix"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass over b rows of s tokens, with M scored tokens.

    The hidden state at flat place `predict_index[j]` (of b * s, row-major) predicts `targets[j]`, which is the token at
    `source_index[j]` of the flat `TokenBatch`.
    """

    kind: Kind
    input_ids: Tensor
    """int64 [b, s]"""
    position_ids: Tensor
    """int64 [b, s] position in the row; under `shared_prefix` a response continues from its prompt's end."""
    attention: AttentionLayout
    """Which tokens attend to which."""
    predict_index: Tensor
    """int64 [M]"""
    targets: Tensor
    """int64 [M]"""
    source_index: Tensor
    """int64 [M]"""
    row_places: RowPlaces | None = None
    """Where each row's tokens are, if it was asked for."""
    token_keys: Tensor | None = None
    """int32 [b, s] each token's, where adapters have dropout; see `dropout.token_keys`."""

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """The same micro-batch on `device`, for activations of `dtype`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            attention=self.attention.to(device, dtype),
            predict_index=self.predict_index.to(device),
            targets=self.targets.to(device),
            source_index=self.source_index.to(device),
            row_places=None if self.row_places is None else self.row_places.to(device),
            token_keys=None if self.token_keys is None else self.token_keys.to(device),
        )


@dataclass(frozen=True, slots=True)
class Passes(Sequence[MicroBatch]):
    """One data-parallel rank's passes over a minibatch, and how the minibatch is laid out over all of them; every rank has as many."""

    mine: tuple[MicroBatch, ...]
    filled: float
    """Tokens that the rows need over the token budget of all passes of all ranks; above 1 where a row is longer than the budget."""
    imbalance: float
    """Cost of the dearest rank's rows over the mean; 1: even."""

    @property
    def metrics(self) -> dict[str, float]:
        """By the names under which a step reports them."""
        return {
            "passes/per_rank": float(len(self.mine)),
            "passes/filled": self.filled,
            "passes/imbalance": self.imbalance,
        }

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int -> micro-batch, slice -> tuple
        return self.mine[index]

    def __len__(self) -> int:
        return len(self.mine)


def plan_microbatches(
    batch: TokenBatch,
    rows: Sequence[int],
    *,
    dp_size: int,
    dp_rank: int,
    kind: Kind,
    token_budget: int,
    together: Tensor | None = None,
    pair_cost: float = 0.0,
    with_row_places: bool = False,
    token_keys: Tensor | None = None,
) -> Passes:
    """This data-parallel rank's share of `rows` (the whole minibatch's), cut into passes of at most `token_budget` tokens.

    Ranks get rows of similar cost: their tokens, and `pair_cost` for each pair of a token and one that it attends to, in tokens (see
    `attention_pair_cost`). Every rank gets the same number of micro-batches, at least one; a missing one is one token with M = 0. A row (or the part of
    a prompt's group that cannot be smaller) longer than the budget makes a pass of its own. Rows of one `prompt_id` stay together
    under `shared_prefix`, and rows of one number in `together` int64 [B] under any kind. The plan is a function of the arguments alone, so ranks need not talk.
    `with_row_places` fills `MicroBatch.row_places`, `token_keys` int32 [N] its `token_keys`. Raises ValueError if rows of one `prompt_id` have different prompts.
    """
    planner = _Planner(batch, rows, kind, token_budget, with_row_places, token_keys)
    units = planner.units()
    if together is not None:
        units = merged(units, together.tolist())
    hands, costs = [units], [1.0]
    if dp_size > 1:
        hands, costs = deal(units, dp_size, lambda unit: planner.cost(unit, pair_cost))
    passes = [planner.passes(hand) for hand in hands]
    count = max(1, max(len(p) for p in passes))
    mine = [planner.build(p) for p in passes[dp_rank]]
    return Passes(
        (*mine, *[empty_pass(kind)] * (count - len(mine))),
        filled=sum(unit.tokens for unit in units) / (count * dp_size * token_budget),
        imbalance=max(costs) * dp_size / sum(costs) if any(costs) else 1.0,
    )


def attention_pair_cost(config: ModelConfig) -> float:
    """What a layer computes for one pair of a token and one that it attends to, over what its matrices compute for one token.

    4 heads d for the two products of a pair, 2 multiply-adds a parameter for a token; both triple in training. Norms and the output head
    are left out: they cost as much for a token of a short row as for one of a long row.
    """
    return 4 * config.heads * config.head_dim / (2 * config.active_parameters)


class _Planner:
    """Knows each row's input length, and lays rows out."""

    def __init__(
        self,
        batch: TokenBatch,
        rows: Sequence[int],
        kind: Kind,
        token_budget: int,
        with_row_places: bool,
        token_keys: Tensor | None,
    ) -> None:
        self._batch, self._kind, self._budget = batch, kind, token_budget
        self._with_row_places, self._token_keys = with_row_places, token_keys
        self._trained = batch.loss_mask.nonzero().flatten()
        self._cuts = torch.searchsorted(self._trained, batch.cu_seqlens)
        self._start: list[int] = batch.cu_seqlens.tolist()
        self._prompt: list[int] = batch.prompt_lens.tolist()
        self._length = self._input_lengths()
        self._rows = [row for row in rows if self._length[row] > 0]

    def _input_lengths(self) -> list[int]:
        """Tokens of each row before its last scored one; 0 for a row without scored tokens."""
        first, last = self._cuts[:-1], self._cuts[1:]
        scored = last > first
        if not bool(scored.any()):
            return [0] * self._batch.rows
        end = self._trained[(last - 1).clamp(min=0)] - self._batch.cu_seqlens[:-1]
        lengths: list[int] = torch.where(scored, end, torch.zeros_like(end)).tolist()
        return lengths

    def units(self) -> list[Unit]:
        """What must not be split: rows, or under `shared_prefix` all rows of one prompt as far as they fit the budget."""
        if self._kind != "shared_prefix":
            return [Unit((row,), self._length[row]) for row in self._rows]
        groups: dict[int, list[int]] = {}
        prompt_id = self._batch.prompt_id.tolist()
        for row in self._rows:
            groups.setdefault(prompt_id[row], []).append(row)
        return [unit for rows in groups.values() for unit in self._split_group(rows)]

    def _split_group(self, rows: list[int]) -> list[Unit]:
        self._check_one_prompt(rows)
        prompt = self._prompt[rows[0]]
        units: list[Unit] = []
        members: list[int] = []
        tokens = prompt
        for row in rows:
            own = self._length[row] - prompt
            if members and tokens + own > self._budget:
                units.append(Unit(tuple(members), tokens))
                members, tokens = [], prompt
            members.append(row)
            tokens += own
        units.append(Unit(tuple(members), tokens))
        return units

    def _check_one_prompt(self, rows: list[int]) -> None:
        lengths = {self._prompt[row] for row in rows}
        if len(lengths) == 1:
            length = lengths.pop()
            starts = torch.tensor([self._start[row] for row in rows])
            prompts = self._batch.tokens[starts[:, None] + torch.arange(length)]
            if bool((prompts == prompts[0]).all()):
                return
        name = int(self._batch.prompt_id[rows[0]])
        raise ValueError(
            f"rows {rows} share prompt_id {name} but not their prompt tokens; give them prompt ids of their own"
        )

    def cost(self, unit: Unit, pair_cost: float) -> float:
        """Tokens of the unit, and its attention in tokens."""
        pairs = 0
        shared = self._prompt[unit.rows[0]] if self._kind == "shared_prefix" else 0
        for row in unit.rows:
            own = self._length[row] - shared
            pairs += own * shared + own * (own + 1) // 2
        return unit.tokens + pair_cost * (pairs + shared * (shared + 1) // 2)

    def passes(self, units: list[Unit]) -> list[list[Unit]]:
        """Units of one rank -> passes that keep to the token budget."""
        longest_first = sorted(units, key=lambda unit: -unit.tokens)
        if self._kind == "padded":
            return self._fill_padded(longest_first)
        return self._fill_flat(longest_first)

    def _fill_flat(self, units: list[Unit]) -> list[list[Unit]]:
        """First fit, longest first; a unit above the budget takes a pass of its own."""
        rooms = Rooms(len(units), self._budget)
        bins: list[list[Unit]] = [[] for _ in units]
        for unit in units:
            bins[rooms.take(unit.tokens)].append(unit)
        return [filled for filled in bins if filled]

    def _fill_padded(self, units: list[Unit]) -> list[list[Unit]]:
        """Rows of similar length; a pass costs rows times its longest row."""
        bins: list[list[Unit]] = []
        for unit in units:
            if bins and (len(bins[-1]) + 1) * bins[-1][0].tokens <= self._budget:
                bins[-1].append(unit)
            else:
                bins.append([unit])
        return bins

    def build(self, units: list[Unit]) -> MicroBatch:
        """Lay out one pass."""
        if self._kind == "shared_prefix":
            return self._shared_prefix(units)
        rows = sorted((row for unit in units for row in unit.rows), key=lambda row: self._length[row])
        return self._padded(rows) if self._kind == "padded" else self._packed(rows)

    def _padded(self, rows: list[int]) -> MicroBatch:
        lengths = torch.tensor([self._length[row] for row in rows])
        width = int(lengths.max())
        column = torch.arange(width)
        real = column < lengths[:, None]
        starts = torch.tensor([self._start[row] for row in rows])
        source = torch.where(real, starts[:, None] + column, torch.zeros_like(column))
        input_ids = torch.where(real, self._batch.tokens[source], 0)
        places = torch.arange(len(rows)) * width
        position_ids = column.expand(len(rows), -1).contiguous()
        built = self._micro_batch(rows, input_ids, position_ids, CausalLayout(), places, places + self._prompts(rows))
        return self._keyed(built, source)

    def _packed(self, rows: list[int]) -> MicroBatch:
        lengths = [self._length[row] for row in rows]
        source = _ranges([self._start[row] for row in rows], lengths)
        positions = _ranges([0] * len(rows), lengths)
        places = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        layout = PackedLayout.of(lengths)
        tokens = self._batch.tokens[source][None]
        built = self._micro_batch(rows, tokens, positions[None], layout, places, places + self._prompts(rows))
        return self._keyed(built, source[None])

    def _shared_prefix(self, units: list[Unit]) -> MicroBatch:
        ordered = sorted(units, key=lambda unit: self._prompt[unit.rows[0]])
        parts = [
            _PrefixPart([ordered[i].rows for i in part], self._start, self._prompt, self._length)
            for part in similar_lengths([self._prompt[unit.rows[0]] for unit in ordered])
        ]
        blocks, offset = [], 0
        for part in parts:
            blocks.append(part.block(offset))
            offset += part.tokens
        source = torch.cat([part.source() for part in parts])
        positions = torch.cat([part.positions() for part in parts])
        rows = [row for part in parts for row in part.rows]
        prompt_places = torch.cat(
            [part.prompt_places + block.prompts.start for part, block in zip(parts, blocks, strict=True)]
        )
        rest_places = torch.cat(
            [part.rest_places + block.prompts.start for part, block in zip(parts, blocks, strict=True)]
        )
        layout = SharedPrefixLayout(tuple(blocks))
        tokens = self._batch.tokens[source][None]
        built = self._micro_batch(rows, tokens, positions[None], layout, prompt_places, rest_places)
        return self._keyed(built, source[None])

    def _keyed(self, micro_batch: MicroBatch, source: Tensor) -> MicroBatch:
        """With the keys of its tokens, which come from `source` [b, s] of the batch; padding has some token's."""
        if self._token_keys is None:
            return micro_batch
        return replace(micro_batch, token_keys=self._token_keys[source])

    def _prompts(self, rows: list[int]) -> Tensor:
        return torch.tensor([self._prompt[row] for row in rows])

    def _micro_batch(
        self,
        rows: list[int],
        input_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionLayout,
        prompt_places: Tensor,
        rest_places: Tensor,
    ) -> MicroBatch:
        """Add what is scored; row i's token p lies at `prompt_places[i]` + p in the prompt, `rest_places[i]` + p - prompt after it."""
        index = torch.tensor(rows)
        counts = self._cuts[index + 1] - self._cuts[index]
        source = self._trained[_ranges(self._cuts[index].tolist(), counts.tolist())]
        row = torch.repeat_interleave(torch.arange(len(rows)), counts)
        before = source - self._batch.cu_seqlens[index][row] - 1
        prompt = self._batch.prompt_lens[index][row]
        place = torch.where(before < prompt, prompt_places[row] + before, rest_places[row] + before - prompt)
        return MicroBatch(
            self._kind,
            input_ids,
            position_ids,
            attention,
            place,
            self._batch.tokens[source],
            source_index=source,
            row_places=self._row_places(rows, prompt_places, rest_places) if self._with_row_places else None,
        )

    def _row_places(self, rows: list[int], prompt_places: Tensor, rest_places: Tensor) -> RowPlaces:
        lengths = [self._length[row] for row in rows]
        on_prompt = [min(self._prompt[row], length) for row, length in zip(rows, lengths, strict=True)]
        rest = [length - before for length, before in zip(lengths, on_prompt, strict=True)]
        index = torch.arange(len(rows))
        return RowPlaces(
            torch.cat([_ranges(prompt_places.tolist(), on_prompt), _ranges(rest_places.tolist(), rest)]),
            torch.cat([torch.repeat_interleave(index, torch.tensor(part)) for part in (on_prompt, rest)]),
            torch.tensor(lengths),
            torch.cat(
                [
                    _ranges([self._start[row] for row in rows], on_prompt),
                    _ranges([self._start[row] + before for row, before in zip(rows, on_prompt, strict=True)], rest),
                ]
            ),
        )


class _PrefixPart:
    """Prompt groups of similar prompt length: all prompts, then all responses that have an input token."""

    def __init__(self, groups: list[tuple[int, ...]], start: list[int], prompt: list[int], length: list[int]) -> None:
        self._prompt_starts = [start[rows[0]] for rows in groups]
        self._prompt_lengths = [prompt[rows[0]] for rows in groups]
        self.rows = [row for rows in groups for row in rows]
        self._group = [g for g, rows in enumerate(groups) for _ in rows]
        self._own = [length[row] - prompt[row] for row in self.rows]
        self._own_starts = [start[row] + prompt[row] for row in self.rows]
        prompt_counts, own_counts = torch.tensor(self._prompt_lengths), torch.tensor(self._own)
        total = int(prompt_counts.sum())
        self.tokens = total + int(own_counts.sum())
        self.prompt_places = (prompt_counts.cumsum(0) - prompt_counts)[self._group]
        self.rest_places = total + own_counts.cumsum(0) - own_counts

    def source(self) -> Tensor:
        """int64 [tokens] index in the flat batch."""
        return torch.cat([_ranges(self._prompt_starts, self._prompt_lengths), _ranges(self._own_starts, self._own)])

    def positions(self) -> Tensor:
        """int64 [tokens] position in the row."""
        on_prompts = _ranges([0] * len(self._prompt_lengths), self._prompt_lengths)
        return torch.cat([on_prompts, _ranges([self._prompt_lengths[g] for g in self._group], self._own)])

    def block(self, offset: int) -> PrefixBlock:
        """How these tokens attend when they start at `offset`."""
        responses = [(g, n) for g, n in zip(self._group, self._own, strict=True) if n > 0]
        return PrefixBlock.of(offset, self._prompt_lengths, responses)


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """int64: start, start + 1, ..., start + length - 1 for each pair, end to end."""
    first, count = torch.tensor(starts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
    offset = first - (count.cumsum(0) - count)
    return torch.repeat_interleave(offset, count) + torch.arange(int(count.sum()))


def empty_pass(kind: Kind) -> MicroBatch:
    """A pass over one token that scores nothing, where a schedule wants more passes than there are rows for."""
    one, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return MicroBatch(kind, one, one, CausalLayout(), none, none, none)
