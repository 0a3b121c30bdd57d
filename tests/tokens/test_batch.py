"""TokenBatch: rows laid end to end and taken out again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.tokens.batch import Row, batch_rows


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
