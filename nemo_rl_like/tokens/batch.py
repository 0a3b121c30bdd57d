"""`TokenBatch`: the rows of one step, laid end to end, with explicit prompt, group and episode ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemo_rl_like.tokens.routes import ROUTES, TokenRoutes

_PER_TOKEN = ("tokens", "loss_mask", "behavior", "version")
_PER_ROW = ("prompt_id", "group_id", "episode_id", "valid")


@dataclass(frozen=True, slots=True)
class Row:
    """One segment of an episode before it is batched: the prompt, then sampled and environment tokens."""

    tokens: Sequence[int]
    """All token ids of the row."""
    prompt_len: int
    """Tokens before the first sampled one."""
    loss_mask: Sequence[bool]
    """[len(tokens)] true only on tokens that are trained."""
    behavior: Sequence[float]
    """[len(tokens)] the engine's log-prob of each sampled token, in nats; 0 elsewhere."""
    version: Sequence[int]
    """[len(tokens)] weight version that sampled the token; -1 elsewhere."""
    prompt_id: int
    """Rows with this id share the first `prompt_len` tokens."""
    group_id: int
    """Rows with this id are compared with each other."""
    episode_id: int
    """Rows with this id are segments of one episode."""
    valid: bool = True
    """False: could not be scored; its loss mask must be all false."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward by name; `reward` is the sum that is trained."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the row by name; every row has the same names."""
    extras: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """[len(tokens)] further numbers of the tokens by name; every row has the same names."""
    routes: TokenRoutes | None = None
    """[len(tokens)] experts that an engine sent the tokens to; None: it told none."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch of B rows with N tokens in all, on the CPU."""

    tokens: Tensor
    """int64 [N] token ids."""
    cu_seqlens: Tensor
    """int64 [B+1] row i is tokens[cu_seqlens[i]:cu_seqlens[i+1]]."""
    prompt_lens: Tensor
    """int64 [B] tokens before the first sampled one."""
    loss_mask: Tensor
    """bool [N] true only on trained tokens."""
    behavior: Tensor
    """float32 [N] behavior log-probs, in nats; 0 where not sampled."""
    version: Tensor
    """int32 [N] weight version of each sampled token; -1 elsewhere."""
    prompt_id: Tensor
    """int64 [B]"""
    group_id: Tensor
    """int64 [B]"""
    episode_id: Tensor
    """int64 [B]"""
    valid: Tensor
    """bool [B]"""
    rewards: dict[str, Tensor] = field(default_factory=dict)
    """float32 [B] by name; NaN where the row is invalid."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """float32 [B] further numbers by name: `truncated`, `greedy`, `opponent`, `last_values`; of preferences `chosen`, `margin`, `mismatched`,
    `explored`."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """float32 [N] further per-token values: `turn`, `turn_rewards`, `proximal`, `reference`, `values`, `advantages`; [N, K] where a
    token has K of them: `teacher_ids` (int32) and `teacher_logprobs`, `routes` (int16)."""

    def __post_init__(self) -> None:
        n, b = self.tokens.numel(), self.prompt_lens.numel()
        for name in _PER_TOKEN:
            _expect(name, getattr(self, name), n)
        for name in _PER_ROW:
            _expect(name, getattr(self, name), b)
        for name, value in self.rewards.items():
            _expect(f"rewards[{name}]", value, b)
        for name, value in self.columns.items():
            _expect(f"columns[{name}]", value, b)
        for name, value in self.extras.items():
            _expect(f"extras[{name}]", value[:, 0] if value.dim() == 2 else value, n)
        if self.cu_seqlens.numel() != b + 1 or int(self.cu_seqlens[-1]) != n:
            raise ValueError(
                f"cu_seqlens must have {b + 1} entries and end at {n}, got {self.cu_seqlens.tolist()[-3:]}"
            )

    @property
    def rows(self) -> int:
        """B, the number of rows."""
        return self.prompt_lens.numel()

    @property
    def lengths(self) -> Tensor:
        """int64 [B] tokens in each row."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def row_of_token(self) -> Tensor:
        """int64 [N] the row that each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.rows), self.lengths)

    @property
    def trained_per_row(self) -> Tensor:
        """int64 [B] trained tokens of each row (T_i)."""
        return torch.zeros(self.rows, dtype=torch.int64).index_add_(0, self.row_of_token, self.loss_mask.long())

    def column(self, name: str) -> Tensor:
        """float32 [B] the rows' numbers of this name. Raises ValueError if the batch has none."""
        if name not in self.columns:
            raise ValueError(f"the batch's rows have no {name!r}; they have {', '.join(self.columns) or 'no columns'}")
        return self.columns[name]

    def with_columns(self, **values: Tensor) -> TokenBatch:
        """The same batch with further numbers of its rows, each float32 [B]."""
        return replace(self, columns={**self.columns, **values})

    def with_extras(self, **values: Tensor) -> TokenBatch:
        """The same batch with further per-token values, each [N] or [N, K]."""
        return replace(self, extras={**self.extras, **values})

    def episodes(self) -> tuple[Tensor, Tensor]:
        """Number of each row's episode, int64 [B], by rising `episode_id`, and the first row of each episode, int64 [E]."""
        ids, number = torch.unique(self.episode_id, return_inverse=True)
        first = torch.full((ids.numel(),), self.rows, dtype=torch.int64)
        return number, first.scatter_reduce_(0, number, torch.arange(self.rows), "amin")

    def select(self, rows: Sequence[int] | Tensor) -> TokenBatch:
        """The batch of these rows, in this order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        starts, lengths = self.cu_seqlens[index], self.lengths[index]
        cu = torch.zeros(index.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=cu[1:])
        token = torch.arange(int(cu[-1])) + torch.repeat_interleave(starts - cu[:-1], lengths)
        per_row = {k: getattr(self, k)[index] for k in (*_PER_ROW, "prompt_lens")}
        per_token = {k: getattr(self, k)[token] for k in _PER_TOKEN}
        return TokenBatch(
            cu_seqlens=cu,
            rewards={k: v[index] for k, v in self.rewards.items()},
            columns={k: v[index] for k, v in self.columns.items()},
            extras={k: v[token] for k, v in self.extras.items()},
            **per_row,
            **per_token,
        )


def batch_rows(rows: Sequence[Row]) -> TokenBatch:
    """Lay rows end to end. Raises ValueError if a row's fields disagree or an invalid row has trained tokens."""
    if not rows:
        raise ValueError("a batch needs at least one row")
    names = sorted({name for row in rows for name in row.rewards})
    columns, extras = rows[0].columns.keys(), rows[0].extras.keys()
    for i, row in enumerate(rows):
        n = len(row.tokens)
        if row.columns.keys() != columns or row.extras.keys() != extras:
            raise ValueError(f"row {i} has other columns or extras than row 0")
        for what, values in row.extras.items():
            if len(values) != n:
                raise ValueError(f"row {i}: {what} has {len(values)} entries for {n} tokens")
        for what in ("loss_mask", "behavior", "version"):
            if len(getattr(row, what)) != n:
                raise ValueError(f"row {i}: {what} has {len(getattr(row, what))} entries for {n} tokens")
        if row.routes is not None and row.routes.tokens != n:
            raise ValueError(f"row {i}: routes has {row.routes.tokens} entries for {n} tokens")
        if not row.valid and any(row.loss_mask):
            raise ValueError(f"row {i} (episode {row.episode_id}) is invalid but has trained tokens")
        if any(row.loss_mask[: row.prompt_len]) or not 0 < row.prompt_len <= n:
            raise ValueError(
                f"row {i}: prompt_len {row.prompt_len} must be in 1..{n} and end before the first trained token"
            )
    lengths = torch.tensor([len(r.tokens) for r in rows], dtype=torch.int64)
    cu = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=cu[1:])
    return TokenBatch(
        tokens=torch.tensor([t for r in rows for t in r.tokens], dtype=torch.int64),
        cu_seqlens=cu,
        prompt_lens=torch.tensor([r.prompt_len for r in rows], dtype=torch.int64),
        loss_mask=torch.tensor([m for r in rows for m in r.loss_mask], dtype=torch.bool),
        behavior=torch.tensor([x for r in rows for x in r.behavior], dtype=torch.float32),
        version=torch.tensor([v for r in rows for v in r.version], dtype=torch.int32),
        prompt_id=torch.tensor([r.prompt_id for r in rows], dtype=torch.int64),
        group_id=torch.tensor([r.group_id for r in rows], dtype=torch.int64),
        episode_id=torch.tensor([r.episode_id for r in rows], dtype=torch.int64),
        valid=torch.tensor([r.valid for r in rows], dtype=torch.bool),
        rewards={k: torch.tensor([r.rewards.get(k, float("nan")) for r in rows], dtype=torch.float32) for k in names},
        columns={k: torch.tensor([r.columns[k] for r in rows], dtype=torch.float32) for k in columns},
        extras={k: torch.tensor([x for r in rows for x in r.extras[k]], dtype=torch.float32) for k in extras}
        | _routes(rows),
    )


def _routes(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Those of all rows, where one has any; a row without them was never answered."""
    width = next((row.routes.width for row in rows if row.routes is not None), None)
    if width is None:
        return {}
    parts = [row.routes or TokenRoutes.none(width, len(row.tokens)) for row in rows]
    return {ROUTES: torch.cat([part.tensor() for part in parts])}


def concat(batches: Sequence[TokenBatch]) -> TokenBatch:
    """The rows of all batches in order, which have the same columns and extras.

    Groups and episodes keep their ids, so those of different batches must differ; prompt ids are numbered anew.
    """
    if len(batches) == 1:
        return batches[0]
    cuts = [torch.zeros(1, dtype=torch.int64)]
    for batch in batches:
        cuts.append(batch.cu_seqlens[1:] + cuts[-1][-1])
    per_row = {k: torch.cat([getattr(b, k) for b in batches]) for k in (*_PER_ROW, "prompt_lens")}
    starts = torch.tensor([0, *(int(b.prompt_id.max()) + 1 for b in batches[:-1])]).cumsum(0)
    per_row["prompt_id"] += torch.repeat_interleave(starts, torch.tensor([b.rows for b in batches]))
    per_token = {k: torch.cat([getattr(b, k) for b in batches]) for k in _PER_TOKEN}
    batches = _with_routes(batches)
    first = batches[0]
    rewards = sorted({name for b in batches for name in b.rewards})
    return TokenBatch(
        cu_seqlens=torch.cat(cuts),
        rewards={k: torch.cat([b.rewards.get(k, torch.full((b.rows,), torch.nan)) for b in batches]) for k in rewards},
        columns={k: torch.cat([b.columns[k] for b in batches]) for k in first.columns},
        extras={k: torch.cat([b.extras[k] for b in batches]) for k in first.extras},
        **per_row,
        **per_token,
    )


def _with_routes(batches: Sequence[TokenBatch]) -> Sequence[TokenBatch]:
    """The same; where one of them has routes, those that have none, whose rows were never answered, get empty ones."""
    found = next((b.extras[ROUTES] for b in batches if ROUTES in b.extras), None)
    if found is None:
        return batches
    return [
        b if ROUTES in b.extras else b.with_extras(**{ROUTES: found.new_zeros(b.tokens.numel(), found.shape[1])})
        for b in batches
    ]


def with_ends(batch: TokenBatch) -> TokenBatch:
    """The batch with one more token at the end of every row, scored where the row has trained tokens; without extras.

    What predicts it is the state after the row: a critic's value there, or a reward model's score of the whole row.
    """
    place, ends = (
        torch.arange(batch.tokens.numel()) + batch.row_of_token,
        batch.cu_seqlens[1:] + torch.arange(batch.rows),
    )
    last, scored = batch.tokens[batch.cu_seqlens[1:] - 1], batch.trained_per_row > 0
    return with_further(batch, place, ends, last, scored)


def with_further(
    batch: TokenBatch, place: Tensor, further: Tensor, tokens: Tensor, scored: Tensor | bool
) -> TokenBatch:
    """The batch with as many `tokens` [M] more in every row, at `further` [M] of the new batch, where its own are at `place` [N]; without extras.

    `scored` says which of them are trained; no engine sampled them.
    """

    def spread(values: Tensor, more: Tensor | float) -> Tensor:
        out = values.new_empty(values.numel() + tokens.numel())
        out[place], out[further] = values, torch.as_tensor(more, dtype=values.dtype)
        return out

    return replace(
        batch,
        tokens=spread(batch.tokens, tokens),
        cu_seqlens=batch.cu_seqlens + tokens.numel() // batch.rows * torch.arange(batch.rows + 1),
        loss_mask=spread(batch.loss_mask, scored),
        behavior=spread(batch.behavior, 0.0),
        version=spread(batch.version, -1),
        extras={},
    )


def _expect(name: str, value: Tensor, count: int) -> None:
    if value.numel() != count:
        raise ValueError(f"{name} has {value.numel()} entries, expected {count}")
