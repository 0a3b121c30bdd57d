"""TokenBatch: rows laid end to end and taken out again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.tokens.batch import Row, batch_rows, concat, with_ends


def row(i, prompt, response, valid=True):
    n = prompt + response
    return Row(
        tokens=[i * 100 + t for t in range(n)],
        prompt_len=prompt,
        loss_mask=[valid and t >= prompt for t in range(n)],
        behavior=[-0.1 * t for t in range(n)],
        version=[-1] * prompt + [3] * response,
        prompt_id=i,
        group_id=i // 2,
        episode_id=i,
        valid=valid,
        rewards={"reward": float(i)},
    )


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=8), st.randoms())
def test_selecting_rows_equals_batching_those_rows(shapes, rnd):
    rows = [row(i, p, r) for i, (p, r) in enumerate(shapes)]
    picked = [rnd.randrange(len(rows)) for _ in range(rnd.randint(1, 10))]
    got, want = batch_rows(rows).select(picked), batch_rows([rows[i] for i in picked])
    for name in ("tokens", "cu_seqlens", "prompt_lens", "loss_mask", "behavior", "version", "group_id", "episode_id"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.rewards["reward"], want.rewards["reward"])


def test_an_invalid_row_with_trained_tokens_is_refused():
    bad = row(1, 2, 2)
    with pytest.raises(ValueError, match="episode 1"):
        batch_rows([Row(**{**{k: getattr(bad, k) for k in bad.__dataclass_fields__}, "valid": False})])


def test_trained_per_row_counts_only_masked_in_tokens():
    batch = batch_rows([row(0, 2, 3), row(1, 4, 0), row(2, 1, 2, valid=False)])
    assert batch.trained_per_row.tolist() == [3, 0, 0]


def test_joined_batches_are_their_rows_with_prompts_of_their_own():
    one, two = batch_rows([row(0, 2, 3), row(1, 1, 2)]), batch_rows([row(2, 3, 1), row(3, 2, 2)])
    got = concat([one, two])
    want = batch_rows([row(0, 2, 3), row(1, 1, 2), row(2, 3, 1), row(3, 2, 2)])
    for name in ("tokens", "cu_seqlens", "loss_mask", "behavior", "version", "group_id", "episode_id"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.prompt_id.unique().numel() == 4
    assert got.rewards["reward"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_row_with_an_end_is_scored_at_its_end_too():
    batch = batch_rows([row(0, 2, 3), row(1, 4, 0), row(2, 1, 2)])
    got = with_ends(batch)
    cuts = got.cu_seqlens.tolist()
    assert got.lengths.tolist() == [6, 5, 4]
    for i, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        old = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
        assert torch.equal(got.tokens[start : end - 1], batch.tokens[old])
        assert torch.equal(got.loss_mask[start : end - 1], batch.loss_mask[old])
        assert bool(got.loss_mask[end - 1]) == bool(batch.loss_mask[old].any())


def test_rows_with_other_columns_or_extras_are_refused():
    plain = row(0, 1, 1)
    fields = {k: getattr(plain, k) for k in plain.__dataclass_fields__}
    with pytest.raises(ValueError, match="other columns"):
        batch_rows([plain, Row(**{**fields, "columns": {"truncated": 1.0}})])
    with pytest.raises(ValueError, match="turn has 1 entries for 2 tokens"):
        batch_rows([Row(**{**fields, "extras": {"turn": [0.0]}})])


def test_extras_of_several_numbers_a_token_follow_their_tokens():
    batch = batch_rows([row(0, 2, 3), row(1, 1, 2), row(2, 3, 1)])
    told = torch.stack([batch.tokens, -batch.tokens], dim=1)
    batch = batch.with_extras(told=told)
    for got in (batch.select([2, 0]), concat([batch, batch]), concat([batch.select([1]), batch.select([2, 0])])):
        assert torch.equal(got.extras["told"], torch.stack([got.tokens, -got.tokens], dim=1))
    with pytest.raises(ValueError, match=r"extras\[told\] has 11 entries, expected 12"):
        batch.with_extras(told=told[:-1])
