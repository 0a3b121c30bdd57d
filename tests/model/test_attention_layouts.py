"""Laws of the layouts: what they compute is attention under the mask that they stand for, values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.model import attention_rows
from nemo_rl_like.model.attention import AttentionLayout, Rotary, rotary_of, rotate
from nemo_rl_like.model.attention_layouts import (
    CausalLayout,
    PackedLayout,
    PrefixBlock,
    SharedPrefixLayout,
    similar_lengths,
)
from nemo_rl_like.model.hf_attention import PLAIN, Scores
from nemo_rl_like.model.rope import rotary_frequencies

HEADS, KV_HEADS, WIDTH = 4, 2, 8


SCORES = {
    "plain": Scores(),
    "scaled": Scores(scale=0.7),
    "window": Scores(window=3),
    "window of one": Scores(window=1),
    "capped": Scores(cap=0.9),
    "all": Scores(scale=0.7, cap=0.9, window=4),
}
kinds_of_scores = st.sampled_from(list(SCORES))


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, given: Scores = PLAIN
) -> torch.Tensor:
    """[t, heads, d] in float64 under a whole [t, t] mask."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (given.scale or WIDTH**-0.5)
    if given.cap is not None:
        scores = given.cap * (scores / given.cap).tanh()
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def assert_equals_dense(
    layout: AttentionLayout, allowed: torch.Tensor, positions: torch.Tensor, scores: Scores
) -> None:
    """`positions` [t] of the tokens in their rows."""
    torch.manual_seed(0)
    tokens = allowed.shape[0]
    if scores.window is not None:
        allowed = allowed & (positions[:, None] - positions < scores.window)
    inputs = [torch.randn(tokens, 1, h, WIDTH).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]
    exact = [x.detach().double().squeeze(1).requires_grad_() for x in inputs]
    out, expected = layout.attend(1, *inputs, scores), dense(*exact, allowed, scores)
    assert torch.allclose(out.squeeze(1).double(), expected, atol=1e-5)
    upstream = torch.randn(tokens, HEADS * WIDTH)
    out.squeeze(1).backward(upstream)
    expected.backward(upstream.double())
    for mine, theirs in zip(inputs, exact, strict=True):
        assert mine.grad is not None and torch.allclose(mine.grad.squeeze(1).double(), theirs.grad, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), kinds_of_scores)
def test_packed_rows_do_not_see_each_other(lengths: list[int], kind: str) -> None:
    lengths = sorted(lengths)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    assert_equals_dense(PackedLayout.of(lengths), (row[:, None] == row).tril(), positions, SCORES[kind])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(0, 7), max_size=4)), min_size=1, max_size=4),
    kinds_of_scores,
)
def test_a_response_sees_its_prompt_and_itself_only(groups: list[tuple[int, list[int]]], kind: str) -> None:
    blocks, kinds, positions, offset = [], [], [], 0
    for part in (groups[:2], groups[2:]):
        if not part:
            continue
        responses = [(g, n) for g, (_, lengths) in enumerate(part) for n in lengths if n]
        blocks.append(PrefixBlock.of(offset, [prompt for prompt, _ in part], responses))
        first = len({g for g, _ in kinds})
        kinds += [(first + g, 0) for g, (prompt, _) in enumerate(part) for _ in range(prompt)]
        kinds += [(first + g, i + 1) for i, (g, n) in enumerate(responses) for _ in range(n)]
        positions += [i for prompt, _ in part for i in range(prompt)]
        positions += [part[g][0] + i for g, n in responses for i in range(n)]
        offset = len(kinds)
    group, response = torch.tensor(kinds).t()
    same_group = group[:, None] == group
    visible = same_group & ((response[:, None] == response) | (response == 0))
    assert_equals_dense(SharedPrefixLayout(tuple(blocks)), visible.tril(), torch.tensor(positions), SCORES[kind])


@pytest.mark.parametrize("kind", SCORES)
def test_padded_rows_are_causal_and_apart(kind: str) -> None:
    torch.manual_seed(0)
    scores = SCORES[kind]
    q, k, v = (torch.randn(5, 2, h, WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS))
    out = CausalLayout().attend(1, q, k, v, scores)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril().triu(1 - (scores.window or 5))
    for row in range(2):
        expected = dense(*(x[:, row].double() for x in (q, k, v)), allowed, scores)
        assert torch.allclose(out[:, row].double(), expected, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3, 7])
@pytest.mark.parametrize("kind", ["window", "capped", "all"])
def test_rows_longer_than_a_call_attend_the_same(kind: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_rows, "_QUERIES", queries)
    row, lengths = torch.repeat_interleave(torch.arange(2), torch.tensor([8, 9])), [8, 9]
    positions = torch.cat([torch.arange(n) for n in lengths])
    assert_equals_dense(PackedLayout.of(lengths), (row[:, None] == row).tril(), positions, SCORES[kind])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 200), max_size=40))
def test_blocks_waste_at_most_a_quarter(lengths: list[int]) -> None:
    lengths = sorted(lengths)
    runs = similar_lengths(lengths)
    assert [i for run in runs for i in run] == list(range(len(lengths)))
    for run in runs:
        part = [lengths[i] for i in run]
        assert len(part) * max(part) <= 1.25 * sum(part)


def test_rotation_equals_hugging_face_and_its_backward_turns_back() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    positions = torch.tensor([[0, 5, 2], [7, 1, 90]])
    rotary = rotary_of(positions, rotary_frequencies(WIDTH, 10000.0), torch.float32)
    x = torch.randn(3, 2, HEADS, WIDTH).requires_grad_()
    cos, sin = (torch.cat([c, c], -1).squeeze(2).transpose(0, 1) for c in (rotary.cos, rotary.sin))
    expected, _ = apply_rotary_pos_emb(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), cos, sin)
    out = rotate(x, rotary)
    assert torch.allclose(out, expected.permute(2, 0, 1, 3), atol=1e-6)
    out.backward(out.detach())
    assert x.grad is not None and torch.allclose(x.grad, x.detach(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_a_layout_converts_its_masks(dtype: torch.dtype) -> None:
    layout = SharedPrefixLayout((PrefixBlock.of(0, [3, 2], [(0, 2), (1, 4)]),)).to(torch.device("cpu"), dtype)
    q, k, v = (torch.randn(11, 1, h, WIDTH, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    assert all(layout.attend(1, q, k, v, scores).dtype == dtype for scores in SCORES.values())
    assert isinstance(Rotary(q, k), Rotary)
