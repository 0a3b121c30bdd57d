"""Laws of a teacher's likeliest tokens against a float64 log-softmax (tensor parallelism: tests/policy/test_distill_laws)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.model.heads import OutputHead, token_logprobs
from nemo_rl_like.model.top_logprobs import top_logprobs

VOCAB = 17


def draw(tokens: int, padding: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, OutputHead]:
    torch.manual_seed(seed)
    return torch.randn(tokens, 6).to(dtype), OutputHead(torch.randn(VOCAB + padding, 6).to(dtype), VOCAB)


def by_hand(table: torch.Tensor, k: int, below: int) -> list[list[int]]:
    """The k likeliest ids of each row of log-probs, of equal ones the lower, found by sorting pairs."""
    return [sorted(range(below), key=lambda v: (-row[v], v))[:k] for row in table.tolist()]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    chunk=st.integers(1, 10),
    padding=st.integers(0, 3),
    k=st.integers(1, VOCAB),
    left_out=st.integers(0, 5),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    seed=st.integers(0, 99),
)
def test_they_are_the_largest_of_the_whole_softmax(
    tokens: int, chunk: int, padding: int, k: int, left_out: int, temperature: float, seed: int
) -> None:
    hidden, head = draw(tokens, padding, seed)
    below = max(VOCAB - left_out, k)
    top = top_logprobs(hidden, head, k, temperature=temperature, chunk_tokens=chunk, below=below)
    table = (hidden.double() @ head.weight[:VOCAB].double().t() / temperature).log_softmax(-1)
    assert top.ids.tolist() == by_hand(table, k, below)
    torch.testing.assert_close(top.logprobs.double(), table.gather(1, top.ids), atol=5e-6, rtol=0)
    assert not top.logprobs.requires_grad


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    hidden, head = torch.ones(1, 1), OutputHead(torch.tensor([[1.0], [2.0], [0.0], [2.0], [-0.0], [2.0]]), 6)
    for k, want in ((2, [1, 3]), (4, [1, 3, 5, 0]), (6, [1, 3, 5, 0, 2, 4])):
        assert top_logprobs(hidden, head, k, temperature=1.0, chunk_tokens=1).ids.tolist() == [want]


def test_they_are_what_the_loss_reads_of_the_same_model() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        hidden, head = draw(5, 2, 3, dtype)
        top = top_logprobs(hidden, head, 4, temperature=1.3, chunk_tokens=2)
        same = token_logprobs(hidden, head, top.ids, temperature=1.3, chunk_tokens=2)
        torch.testing.assert_close(top.logprobs, same.logprobs, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("k", "options", "words"),
    [
        (0, {}, "k is 0, must be in 1..17"),
        (9, {"below": 8}, "k is 9, must be in 1..8"),
        (2, {"temperature": 0.0}, "both must be positive"),
        (2, {"chunk_tokens": 0}, "both must be positive"),
    ],
)
def test_what_cannot_be_asked_is_refused(k: int, options: dict[str, float], words: str) -> None:
    hidden, head = draw(2, 0, 0)
    with pytest.raises(ValueError, match=words):
        top_logprobs(hidden, head, k, **{"temperature": 1.0, "chunk_tokens": 4, **options})  # type: ignore[arg-type]
