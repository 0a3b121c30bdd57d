"""Laws of the plan: every scored token once, equal passes on every rank, budgets kept, prompts shared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.layouts import Kind, MicroBatch, attention_pair_cost, plan_microbatches
from nemo_rl_like.model.packing import Rooms
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows

KINDS = st.sampled_from(["padded", "packed", "shared_prefix"])


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    rows = []
    for prompt_id in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 4))):
            response = draw(st.lists(st.integers(0, 50), min_size=0, max_size=6))
            trained = [draw(st.booleans()) for _ in response]
            tokens, n = prompt + response, len(prompt) + len(response)
            mask = [False] * len(prompt) + trained
            rows.append(Row(tokens, len(prompt), mask, [0.0] * n, [-1] * n, prompt_id, prompt_id, len(rows)))
    order = draw(st.permutations(range(len(rows))))
    return batch_rows([rows[i] for i in order])


def plan(batch: TokenBatch, kind: Kind, dp: int, budget: int, rows: list[int] | None = None) -> list[list[MicroBatch]]:
    chosen = list(range(batch.rows)) if rows is None else rows
    return [
        plan_microbatches(batch, chosen, dp_size=dp, dp_rank=rank, kind=kind, token_budget=budget) for rank in range(dp)
    ]


@settings(max_examples=60, deadline=None)
@given(batches(), KINDS, st.integers(1, 3), st.integers(1, 60))
def test_every_scored_token_is_predicted_once_from_the_token_before_it(
    batch: TokenBatch, kind: Kind, dp: int, budget: int
) -> None:
    ranks = plan(batch, kind, dp, budget)
    assert len({len(passes) for passes in ranks}) == 1
    scored = []
    for micro_batch in (m for passes in ranks for m in passes):
        source, place = micro_batch.source_index, micro_batch.predict_index
        scored += source.tolist()
        assert torch.equal(micro_batch.targets, batch.tokens[source])
        if len(source):
            assert torch.equal(micro_batch.input_ids.flatten()[place], batch.tokens[source - 1])
            first = batch.cu_seqlens[batch.row_of_token[source]]
            assert torch.equal(micro_batch.position_ids.flatten()[place], source - 1 - first)
    assert sorted(scored) == batch.loss_mask.nonzero().flatten().tolist()


@pytest.mark.parametrize("kind", ["padded", "packed", "shared_prefix"])
@settings(max_examples=60, deadline=None)
@given(batch=batches(), budget=st.integers(1, 25))
def test_only_a_lone_row_exceeds_the_token_budget(kind: Kind, batch: TokenBatch, budget: int) -> None:
    for micro_batch in plan(batch, kind, 1, budget)[0]:
        if micro_batch.input_ids.numel() > budget:
            assert len(set(batch.row_of_token[micro_batch.source_index].tolist())) <= 1


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(1, 3))
def test_rows_of_one_prompt_stay_together_and_compute_it_once(batch: TokenBatch, dp: int) -> None:
    seen: set[int] = set()
    for micro_batch in (m for passes in plan(batch, "shared_prefix", dp, 10_000) for m in passes):
        rows = sorted(set(batch.row_of_token[micro_batch.source_index].tolist()))
        prompts = set(batch.prompt_id[rows].tolist())
        assert not prompts & seen
        seen |= prompts
        if not rows:
            continue
        prompt_tokens = sum(int(batch.prompt_lens[batch.prompt_id == p][0]) for p in prompts)
        last = [int(micro_batch.source_index[batch.row_of_token[micro_batch.source_index] == r].max()) for r in rows]
        own = sum(t - int(batch.cu_seqlens[r]) - int(batch.prompt_lens[r]) for r, t in zip(rows, last, strict=True))
        assert micro_batch.input_ids.numel() == prompt_tokens + own


@settings(max_examples=20, deadline=None)
@given(batches(), KINDS)
def test_rows_that_were_not_asked_for_are_left_out(batch: TokenBatch, kind: Kind) -> None:
    chosen = list(range(0, batch.rows, 2))
    sources = torch.cat([m.source_index for m in plan(batch, kind, 1, 100, chosen)[0]])
    assert set(batch.row_of_token[sources].tolist()) <= set(chosen)


def test_rows_that_share_a_prompt_id_but_not_the_prompt_are_refused() -> None:
    rows = [Row(t, 2, [False, False, True], [0.0] * 3, [-1] * 3, 7, 7, i) for i, t in enumerate(([1, 2, 3], [1, 9, 3]))]
    with pytest.raises(ValueError, match="prompt_id 7"):
        plan(batch_rows(rows), "shared_prefix", 1, 100)


def test_data_parallel_ranks_get_similar_work() -> None:
    rows = [
        Row([1] * n, 1, [False] + [True] * (n - 1), [0.0] * n, [-1] * n, i, i, i) for i, n in enumerate(range(2, 42))
    ]
    loads = [sum(m.input_ids.numel() for m in passes) for passes in plan(batch_rows(rows), "packed", 4, 10_000)]
    assert max(loads) <= 1.1 * min(loads)


def row_of(length: int, number: int) -> Row:
    return Row([1] * length, 1, [False] + [True] * (length - 1), [0.0] * length, [-1] * length, number, number, number)


@pytest.mark.parametrize("kind", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize(("counted", "share"), [(0.0, (0.6, 1.0)), (1 / 50, (0.5, 0.51))])
def test_a_long_row_counts_for_its_attention(kind: Kind, counted: float, share: tuple[float, float]) -> None:
    """One row of 400 input tokens and 160 of 20: dealt by tokens alone, the rank of the long one has three fifths of the work."""
    batch = batch_rows([row_of(401, 0), *(row_of(21, i) for i in range(1, 161))])
    ranks = [
        plan_microbatches(
            batch, range(batch.rows), dp_size=2, dp_rank=rank, kind=kind, token_budget=10_000, pair_cost=counted
        )
        for rank in range(2)
    ]
    work = [sum(cost_of(batch, micro_batch, 1 / 50) for micro_batch in passes) for passes in ranks]
    assert share[0] <= max(work) / sum(work) <= share[1]


def test_what_a_step_reports_of_its_passes() -> None:
    """Rows of 30, 20, 10 and 10 tokens in passes of 40: one rank fills two passes; two ranks get 30 + 10 and 20 + 10."""
    batch = batch_rows([row_of(length + 1, i) for i, length in enumerate((30, 20, 10, 10))])
    alone = plan_microbatches(batch, range(4), dp_size=1, dp_rank=0, kind="packed", token_budget=40)
    assert alone.metrics == {"passes/per_rank": 2.0, "passes/filled": 70 / 80, "passes/imbalance": 1.0}
    for rank in range(2):
        pair = plan_microbatches(batch, range(4), dp_size=2, dp_rank=rank, kind="packed", token_budget=40)
        assert pair.metrics == {"passes/per_rank": 1.0, "passes/filled": 70 / 80, "passes/imbalance": 40 / 35}
    none = plan_microbatches(batch, (), dp_size=2, dp_rank=0, kind="packed", token_budget=40)
    assert none.metrics == {"passes/per_rank": 1.0, "passes/filled": 0.0, "passes/imbalance": 1.0}


def cost_of(batch: TokenBatch, micro_batch: MicroBatch, pair_cost: float) -> float:
    """Tokens and pairs of the rows that a pass scores."""
    rows = set(batch.row_of_token[micro_batch.source_index].tolist())
    lengths = [int(batch.cu_seqlens[row + 1] - batch.cu_seqlens[row]) - 1 for row in rows]
    return sum(n + pair_cost * n * (n + 1) / 2 for n in lengths)


def test_a_pair_costs_what_the_products_of_a_layer_say() -> None:
    """Llama 3 8B: 4 x 4096 operations a pair, over twice the 218 million parameters of a layer."""
    shape = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    assert attention_pair_cost(ModelConfig.from_hf_dict(shape.to_dict())) == pytest.approx(16384 / (2 * 218_103_808))


@settings(max_examples=60, deadline=None)
@given(batches(), KINDS, st.integers(1, 3), st.integers(1, 40), st.integers(2, 4))
def test_rows_of_one_number_share_a_pass(batch: TokenBatch, kind: Kind, dp: int, budget: int, numbers: int) -> None:
    together = torch.arange(batch.rows) % numbers
    passes = [
        micro_batch.source_index
        for rank in range(dp)
        for micro_batch in plan_microbatches(
            batch,
            list(range(batch.rows)),
            dp_size=dp,
            dp_rank=rank,
            kind=kind,
            token_budget=budget,
            together=together,
        )
    ]
    seen = [set(together[batch.row_of_token[source]].tolist()) for source in passes]
    assert sorted(torch.cat(passes).tolist()) == batch.loss_mask.nonzero().flatten().tolist()
    assert all(not (a & b) for i, a in enumerate(seen) for b in seen[i + 1 :])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 10))
def test_passes_are_those_of_first_fit_by_hand(sizes: list[int], budget: int) -> None:
    rooms, made = Rooms(len(sizes), budget), []
    free: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = next((i for i, room in enumerate(free) if room >= size), None)
        if place is None:
            place = len(free)
            free.append(budget)
        free[place] -= size
        made.append(rooms.take(size) == place)
    assert all(made)
