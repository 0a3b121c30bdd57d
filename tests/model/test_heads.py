"""Laws of the vocabulary head against a float64 log-softmax (tensor parallelism: test_parallel)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.model.heads import OutputHead, full_logits, token_logprobs


def draw(
    tokens: int, hidden: int, vocab: int, padding: int, seed: int
) -> tuple[torch.Tensor, OutputHead, torch.Tensor]:
    torch.manual_seed(seed)
    weight = torch.randn(vocab + padding, hidden).requires_grad_()
    states = torch.randn(tokens, hidden).requires_grad_()
    return states, OutputHead(weight, vocab), torch.randint(vocab, (tokens,))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    chunk=st.integers(1, 10),
    padding=st.integers(0, 3),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    entropy_weight=st.sampled_from([None, 0.0, 0.7]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_float64_for_any_chunk(
    tokens: int, chunk: int, padding: int, temperature: float, entropy_weight: float | None, seed: int
) -> None:
    hidden, head, targets = draw(tokens, 6, 17, padding, seed)
    g = torch.randn(tokens)
    out = token_logprobs(
        hidden, head, targets, temperature=temperature, chunk_tokens=chunk, want_entropy=entropy_weight is not None
    )
    loss = (out.logprobs * g).sum()
    states, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    log_softmax = (states @ weight[:17].t() / temperature).log_softmax(-1)
    logprobs = log_softmax.gather(1, targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    expected = (logprobs * g).sum()
    if entropy_weight is None:
        assert out.entropy is None
    else:
        assert out.entropy is not None
        assert torch.allclose(out.entropy.double(), entropy, atol=5e-6)
        if entropy_weight:
            loss, expected = (
                loss + entropy_weight * (out.entropy * g).sum(),
                expected + entropy_weight * (entropy * g).sum(),
            )
    loss.backward()
    expected.backward()
    assert torch.allclose(out.logprobs.double(), logprobs, atol=5e-6)
    assert hidden.grad is not None and torch.allclose(hidden.grad.double(), states.grad, atol=2e-5)
    assert head.weight.grad is not None and torch.allclose(head.weight.grad.double(), weight.grad, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(
    chunk=st.integers(1, 6),
    count=st.integers(1, 3),
    padding=st.integers(0, 3),
    temperature=st.sampled_from([1.0, 1.7]),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_capped_logits_equal_float64_in_value_and_gradient(
    chunk: int, count: int, padding: int, temperature: float, entropy: bool, seed: int
) -> None:
    hidden, head, _ = draw(5, 6, 17, padding, seed)
    head = replace(head, cap=1.5)
    targets = torch.stack([torch.randperm(17)[:count] for _ in range(5)]) if count > 1 else torch.arange(5)
    out = token_logprobs(
        hidden, head, targets, temperature=temperature, chunk_tokens=chunk, want_entropy=entropy, want_log_norm=True
    )
    states, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    capped = 1.5 * (states @ weight[:17].t() / 1.5).tanh()
    assert torch.allclose(full_logits(hidden, head).double(), capped, atol=5e-6)
    logits = capped / temperature
    log_softmax = logits.log_softmax(-1)
    want = log_softmax.gather(1, targets.view(5, -1)).view(targets.shape)
    g = torch.randn(targets.shape)
    loss, expected = (out.logprobs * g).sum(), (want * g).sum()
    assert out.log_norm is not None
    loss, expected = loss + out.log_norm.square().sum(), expected + logits.logsumexp(-1).square().sum()
    if out.entropy is not None:
        loss = loss + out.entropy.sum()
        expected = expected - (log_softmax.exp() * log_softmax).sum()
    loss.backward()
    expected.backward()
    assert torch.allclose(out.logprobs.double(), want, atol=5e-6)
    assert hidden.grad is not None and torch.allclose(hidden.grad.double(), states.grad, atol=2e-5)
    assert head.weight.grad is not None and torch.allclose(head.weight.grad.double(), weight.grad, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(
    chunk=st.integers(1, 6),
    count=st.integers(2, 4),
    temperature=st.sampled_from([1.0, 1.7]),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_several_tokens_a_place_equal_float64_in_value_and_gradient(
    chunk: int, count: int, temperature: float, entropy: bool, seed: int
) -> None:
    hidden, head, _ = draw(5, 6, 17, 2, seed)
    targets = torch.stack([torch.randperm(17)[:count] for _ in range(5)])
    g = torch.randn(5, count)
    out = token_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=chunk, want_entropy=entropy)
    states, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    log_softmax = (states @ weight[:17].t() / temperature).log_softmax(-1)
    want = log_softmax.gather(1, targets)
    loss, expected = (out.logprobs * g).sum(), (want * g).sum()
    if out.entropy is not None:
        loss = loss + out.entropy.sum()
        expected = expected - (log_softmax.exp() * log_softmax).sum()
    loss.backward()
    expected.backward()
    assert torch.allclose(out.logprobs.double(), want, atol=5e-6)
    assert hidden.grad is not None and torch.allclose(hidden.grad.double(), states.grad, atol=2e-5)
    assert head.weight.grad is not None and torch.allclose(head.weight.grad.double(), weight.grad, atol=2e-5)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [2, 8])
@pytest.mark.parametrize("alone", [False, True])
def test_the_log_normaliser_equals_float64_in_value_and_gradient(chunk: int, entropy: bool, alone: bool) -> None:
    hidden, head, targets = draw(5, 6, 17, 2, 7)
    out = token_logprobs(
        hidden, head, targets, temperature=0.7, chunk_tokens=chunk, want_entropy=entropy, want_log_norm=True
    )
    states, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    logits = states @ weight[:17].t() / 0.7
    log_norm, table = logits.logsumexp(-1), logits.log_softmax(-1)
    assert out.log_norm is not None and torch.allclose(out.log_norm.double(), log_norm, atol=5e-6)
    loss, expected = out.log_norm.square().sum(), log_norm.square().sum()
    if not alone:
        loss, expected = loss + out.logprobs.sum(), expected + table.gather(1, targets[:, None]).sum()
    if out.entropy is not None:
        loss, expected = loss + out.entropy.sum(), expected - (table.exp() * table).sum()
    loss.backward()
    expected.backward()
    assert hidden.grad is not None and torch.allclose(hidden.grad.double(), states.grad, atol=2e-5)
    assert head.weight.grad is not None and torch.allclose(head.weight.grad.double(), weight.grad, atol=2e-5)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [2, 8])
def test_the_collision_equals_float64_and_changes_no_gradient(chunk: int, entropy: bool) -> None:
    hidden, head, targets = draw(5, 6, 17, 2, 4)
    wanted = {"temperature": 0.7, "chunk_tokens": chunk, "want_entropy": entropy}
    plain = token_logprobs(hidden, head, targets, **wanted)  # type: ignore[arg-type]
    out = token_logprobs(hidden, head, targets, **wanted, want_collision=True)  # type: ignore[arg-type]
    assert plain.collision is None and out.collision is not None and not out.collision.requires_grad
    table = (hidden.detach().double() @ head.weight.detach()[:17].double().t() / 0.7).log_softmax(-1)
    assert torch.allclose(out.collision.double(), (2 * table).logsumexp(-1), atol=5e-6)
    grads = [torch.autograd.grad(o.logprobs.sum(), hidden)[0] for o in (plain, out)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("chunk", [1, 8])
def test_logits_like_minus_infinity_give_finite_gradients(chunk: int) -> None:
    hidden, head, targets = draw(4, 6, 17, 0, 0)
    with torch.no_grad():
        hidden[1] *= 1e9
        head.weight[3] = -1e12
    out = token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=chunk, want_entropy=True)
    assert out.entropy is not None
    (out.logprobs.sum() + out.entropy.sum()).backward()
    for value in (out.logprobs, out.entropy, hidden.grad, head.weight.grad):
        assert value is not None and bool(torch.isfinite(value).all())


def test_padded_vocabulary_never_wins() -> None:
    hidden, head, targets = draw(5, 6, 17, 2, 1)
    with torch.no_grad():
        head.weight[17:] = hidden[0] * 100
    assert full_logits(hidden, head).shape == (5, 17)
    out = token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=2)
    assert torch.allclose(
        out.logprobs, full_logits(hidden, head).log_softmax(-1).gather(1, targets[:, None])[:, 0], atol=1e-5
    )
    out.logprobs.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad[17:].any()


def test_no_more_logits_than_a_chunk_exist_at_once() -> None:
    hidden, head, targets = draw(64, 4, 5000, 0, 2)
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (5000,):
                biggest = max(biggest, out.shape[0])
            return out

    with Watch():
        token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=16).logprobs.sum().backward()
    assert biggest == 16


@pytest.mark.parametrize(("budget", "again"), [(0, 3), (2 * 16 * 5000 * 4, 2), (10**9, 0)])
def test_the_backward_computes_only_the_logits_that_the_budget_did_not_keep(
    monkeypatch: pytest.MonkeyPatch, budget: int, again: int
) -> None:
    monkeypatch.setattr("nemo_rl_like.model.heads.KEPT_EXPONENTIALS", budget)
    hidden, head, targets = draw(64, 4, 5000, 0, 2)
    products = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal products
            out = func(*args, **(kwargs or {}))
            products += func is torch.ops.aten.mm.default and out.shape == (16, 5000)
            return out

    with Count():
        out = token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=16, want_entropy=True)
        out.logprobs.sum().backward()
    assert products == 4 + again
    exact = hidden.detach().double().requires_grad_()
    (exact @ head.weight.detach().double().t()).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    assert hidden.grad is not None and torch.allclose(hidden.grad.double(), exact.grad, atol=2e-5)


def test_a_second_backward_gives_the_same_gradient() -> None:
    hidden, head, targets = draw(5, 6, 17, 0, 3)
    loss = token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=2).logprobs.sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(loss, hidden)[0], first, atol=1e-6)


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_arguments_that_are_not_positive_are_refused(temperature: float, chunk: int) -> None:
    hidden, head, targets = draw(2, 6, 17, 0, 0)
    with pytest.raises(ValueError, match="positive"):
        token_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=chunk)
