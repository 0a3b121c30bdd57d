"""Laws of the sampler."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.generation.sampler import draw, seeds_tensor, uniforms


def _splitmix(seed: int, position: int) -> float:
    """The same draw in plain Python integers."""
    mask = (1 << 64) - 1

    def finalise(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    state = finalise((seed + golden) & mask)
    return (finalise((state + position * golden) & mask) >> 12) / 2**52


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_uniforms_equal_the_integer_reference(seed: int, position: int) -> None:
    got = uniforms(seeds_tensor([seed]), torch.tensor([position]))
    assert got.item() == _splitmix(seed, position)
    assert 0 <= got.item() < 1


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, -math.inf, 1.0, 3.0])
    rows = 40_000
    u = uniforms(seeds_tensor(range(rows)), torch.full((rows,), 5))
    tokens, logprobs = draw(logits.expand(rows, -1), u, temperature)
    expected = torch.softmax(logits / temperature, 0)
    counts = torch.bincount(tokens, minlength=6)
    chi2 = ((counts - rows * expected) ** 2 / (rows * expected))[expected > 0].sum()
    assert counts[3] == 0 and chi2 < 20.5  # 99.9 % quantile at 4 degrees of freedom is 18.5
    assert torch.allclose(logprobs, expected.log()[tokens])


def test_positions_and_seeds_are_independent_streams() -> None:
    grid = uniforms(seeds_tensor(range(300)).repeat_interleave(300), torch.arange(300).repeat(300)).reshape(300, 300)
    centred = grid - 0.5
    for shifted in (
        centred[1:, :] * centred[:-1, :],
        centred[:, 1:] * centred[:, :-1],
        centred[1:, :-1] * centred[:-1, 1:],
    ):
        assert abs(float(shifted.mean())) < 5 * (1 / 12) / math.sqrt(shifted.numel())


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 3000])
def test_a_draw_inverts_the_cumulative_distribution(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(500, vocab) * 3
    u = uniforms(seeds_tensor(range(500)), torch.zeros(500, dtype=torch.int64))
    tokens, _ = draw(logits, u, 0.9)
    exact = (logits.double() / 0.9).softmax(-1)
    above = exact.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    below = above - exact.gather(1, tokens[:, None])[:, 0]
    assert bool((below - 1e-6 <= u).all() and (u <= above + 1e-6).all())


@pytest.mark.parametrize("vocab", [101, 1000])
def test_a_draw_does_not_depend_on_the_other_rows(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, vocab) * 5
    u = uniforms(seeds_tensor(range(9)), torch.arange(9))
    tokens, logprobs = draw(logits, u, 0.8)
    for i in range(9):
        alone = draw(logits[i : i + 1], u[i : i + 1], 0.8)
        assert alone[0].item() == tokens[i].item() and alone[1].item() == logprobs[i].item()


@given(st.floats(0, 1, exclude_max=True))
@settings(deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    logits = torch.tensor([[-math.inf, 0.3, -200.0, 0.1, -math.inf, -math.inf]])
    tokens, _ = draw(logits, torch.tensor([u], dtype=torch.float64), 1.0)
    assert tokens.item() in (1, 3)


@given(st.floats(0, 1, exclude_max=True), st.sets(st.integers(0, 299), min_size=1, max_size=5))
@settings(deadline=None)
def test_blocks_without_probability_are_never_drawn_from(u: float, possible: set[int]) -> None:
    logits = torch.full((1, 300), -math.inf)
    logits[0, list(possible)] = torch.linspace(-80.0, 0.0, len(possible))
    tokens, logprobs = draw(logits, torch.tensor([u], dtype=torch.float64), 1.0)
    assert tokens.item() in possible and bool(logprobs.isfinite())


def test_the_largest_uniform_still_draws_a_token_of_the_vocabulary() -> None:
    logits = torch.randn(64, 50_000)
    u = torch.full((64,), 1 - 2.0**-52, dtype=torch.float64)
    assert int(draw(logits, u, 1.0)[0].max()) < 50_000


def test_greedy_takes_the_most_likely_token_at_temperature_one() -> None:
    logits = torch.randn(5, 11)
    tokens, logprobs = draw(logits, None, 1.0)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).amax(-1))
