"""Distillation against float64 loops over the vocabulary, for every beta, k and temperature, and against TRL where k is all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trl.experimental.gkd import GKDTrainer

from nemo_rl_like.algorithms.distillation import TAIL_FLOOR, Distillation, generalized_jsd, with_tail
from nemo_rl_like.algorithms.objectives import Outputs
from nemo_rl_like.spec.distill import DistillationSpec
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows

from .oracle import distill as oracle
from .passes import splits

VOCAB = 7
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
PROMPTS = ([1, 2, 3], [1, 2, 3], [4, 5], [6])
RESPONSES = (4, 2, 3, 5)
SAMPLED = (1.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True)
class Step:
    """Rows with both sides' logits float64 [N, V] at every token, and what the batch carries of the teacher's."""

    batch: TokenBatch
    student: Tensor
    teacher: Tensor
    temperature: float

    @property
    def trained(self) -> list[int]:
        """Places of trained tokens."""
        return self.batch.loss_mask.nonzero()[:, 0].tolist()

    def kept(self, place: int) -> list[int]:
        """The teacher's likeliest tokens there."""
        return self.batch.extras["teacher_ids"][place].tolist()


def rows() -> TokenBatch:
    """Two rows share a prompt; one token inside a response is not trained."""
    made = []
    for i, (prompt, count) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        mask = [False] * len(prompt) + [not (i == 0 and t == 1) for t in range(count)]
        tokens = [*prompt, *((i + 2 * t) % VOCAB for t in range(count))]
        n = len(tokens)
        made.append(
            Row(
                tokens=tokens,
                prompt_len=len(prompt),
                loss_mask=mask,
                behavior=[0.0] * n,
                version=[-1] * n,
                prompt_id=max(i - 1, 0),
                group_id=i,
                episode_id=i,
                columns={"teacher": 0.0, "sampled": SAMPLED[i]},
            )
        )
    return batch_rows(made)


def step(k: int, temperature: float = 1.0, scale: float = 2.0, seed: int = 0) -> Step:
    batch = rows()
    draw = torch.Generator().manual_seed(seed)
    count = batch.tokens.numel()
    student, teacher = (torch.randn(count, VOCAB, generator=draw, dtype=torch.float64) * scale for _ in range(2))
    logprobs, ids = (teacher / temperature).log_softmax(-1).topk(k, dim=1)
    mask = batch.loss_mask[:, None]
    extras = {
        "teacher_ids": torch.where(mask, ids, 0).int(),
        "teacher_logprobs": torch.where(mask, logprobs, torch.nan),
    }
    return Step(batch.with_extras(**extras), student, teacher, temperature)


def options(**fields: Any) -> DistillationSpec:
    return DistillationSpec.model_validate(fields)


def made(this: Step, objective: Distillation, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss over passes, its gradient by the student's logits, and the metrics."""
    stats = objective.prepare(this.batch)
    assert stats.candidates is not None
    at = this.student.clone().requires_grad_()
    table = (at / this.temperature).log_softmax(-1)
    total, metrics = at.new_zeros(()), dict.fromkeys(objective.metric_names, 0.0)
    for part in parts:
        values = {name: value[part].double() for name, value in stats.values.items()}
        own = table[part].gather(1, this.batch.tokens[part, None])[:, 0]
        candidates = table[part].gather(1, stats.candidates[part].long())
        out = objective.loss(Outputs(own, candidates=candidates), values, stats.weights[part].double(), stats)
        metrics = {name: metrics[name] + float(out.metrics[name]) for name in metrics}
        total = total + out.loss
    (slope,) = torch.autograd.grad(total, at)
    return total.detach(), slope, metrics


def whole(this: Step) -> list[Tensor]:
    return [torch.tensor(this.trained)]


def expected(this: Step, k: int, beta: float, sft_coef: float = 0.0) -> tuple[Tensor, Tensor]:
    """The oracle's loss and its gradient by the student's logits."""
    at = this.student.clone().requires_grad_()
    total = at.new_zeros(())
    own = [p for p in this.trained if SAMPLED[int(this.batch.row_of_token[p])] == 0]
    for place in this.trained:
        student, teacher = list(at[place]), this.teacher[place].tolist()
        if k == VOCAB:
            told = oracle.gkd(student, teacher, beta, this.temperature)
        else:
            told = oracle.gkd_top_k(student, teacher, this.kept(place), beta, this.temperature)
        total = total + told / len(this.trained)
        if place in own:
            total = total - sft_coef * oracle.log_softmax(student)[int(this.batch.tokens[place])] / len(own)
    (slope,) = torch.autograd.grad(total, at)
    return total.detach(), slope


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("k", [1, 3, VOCAB])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_equal_the_oracle(beta: float, k: int, temperature: float) -> None:
    this = step(k, temperature)
    loss, slope, metrics = made(this, Distillation(options(beta=beta)), whole(this))
    want, want_slope = expected(this, k, beta)
    torch.testing.assert_close(loss, want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(slope, want_slope, atol=1e-6, rtol=1e-5)
    assert metrics["loss"] == pytest.approx(float(want), abs=1e-6)


def test_cross_entropy_is_added_on_the_datas_own_responses() -> None:
    this = step(3)
    loss, slope, _ = made(this, Distillation(options(beta=0.5, sft_coef=0.3)), whole(this))
    want, want_slope = expected(this, 3, 0.5, 0.3)
    torch.testing.assert_close(loss, want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(slope, want_slope, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sft_coef", [0.0, 0.5])
def test_any_split_into_passes_and_ranks_gives_the_same(sft_coef: float) -> None:
    this, objective = step(3), Distillation(options(beta=0.3, sft_coef=sft_coef))
    loss, slope, metrics = made(this, objective, whole(this))
    for parts in splits(objective, this.batch):
        other, other_slope, others = made(this, objective, parts)
        torch.testing.assert_close(other, loss, atol=1e-12, rtol=0)
        torch.testing.assert_close(other_slope, slope, atol=1e-12, rtol=0)
        assert others == pytest.approx(metrics, abs=1e-9)


def test_the_order_of_rows_changes_nothing() -> None:
    this, objective = step(3), Distillation(options(beta=0.3))
    order = [3, 1, 0, 2]
    index = torch.cat([torch.arange(*this.batch.cu_seqlens[i : i + 2].tolist()) for i in order])
    other = replace(this, batch=this.batch.select(order), student=this.student[index], teacher=this.teacher[index])
    loss, slope, _ = made(this, objective, whole(this))
    again, again_slope, _ = made(other, objective, whole(other))
    torch.testing.assert_close(again, loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(again_slope, slope[index], atol=1e-12, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("beta", BETAS)
def test_the_whole_vocabulary_equals_trl(beta: float, temperature: float) -> None:
    this = step(VOCAB, temperature)
    loss, slope, _ = made(this, Distillation(options(beta=beta)), whole(this))
    at = this.student.clone().requires_grad_()
    labels = torch.where(this.batch.loss_mask, this.batch.tokens, -100)[None]
    want = GKDTrainer.generalized_jsd_loss(at[None], this.teacher[None], labels, beta=beta, temperature=temperature)
    (want_slope,) = torch.autograd.grad(want, at)
    torch.testing.assert_close(loss, want.detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(slope, want_slope, atol=1e-6, rtol=1e-5)


def test_metrics_say_both_kls_tail_agreement_and_likelihood() -> None:
    this = step(3)
    _, _, metrics = made(this, Distillation(options(beta=0.5)), whole(this))
    forward, reverse, tail, same, nll = [], [], [], [], []
    for place in this.trained:
        student, teacher = this.student[place].tolist(), this.teacher[place].tolist()
        forward.append(float(oracle.gkd_top_k(student, teacher, this.kept(place), 0.0)))
        reverse.append(float(oracle.gkd_top_k(student, teacher, this.kept(place), 1.0)))
        kept = this.kept(place)
        tail.append(1 - sum(float(oracle.log_softmax(teacher)[v].exp()) for v in kept))
        same.append(float(max(kept, key=lambda v: student[v]) == kept[0]))
        nll.append(-float(oracle.log_softmax(student)[int(this.batch.tokens[place])]))
    means = {
        "kl/forward": forward, "kl/reverse": reverse, "teacher_tail": tail, "agreement": same, "nll": nll,
    }  # fmt: skip
    for name, values in means.items():
        assert metrics[name] == pytest.approx(sum(values) / len(values), abs=1e-6), name


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, VOCAB),
    beta=st.floats(0, 1),
    sharp=st.tuples(st.sampled_from([0.0, 1.0, 30.0, 300.0]), st.sampled_from([0.0, 1.0, 30.0, 300.0])),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_a_divergence_is_finite_and_not_negative_however_sharp(
    k: int, beta: float, sharp: tuple[float, float], dtype: torch.dtype, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = [(torch.randn(3, VOCAB, generator=draw) * scale).to(dtype) for scale in sharp]
    at = logits[0].requires_grad_()
    teacher, ids = logits[1].log_softmax(-1).topk(k, dim=1)
    told = generalized_jsd(with_tail(at.log_softmax(-1).gather(1, ids)), with_tail(teacher), beta)
    told.sum().backward()
    assert at.grad is not None and bool(torch.isfinite(told).all()) and bool(torch.isfinite(at.grad).all())
    assert float(told.detach().min()) > -2e-5


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    at = (torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 5).requires_grad_()
    teacher, ids = at.detach().log_softmax(-1).topk(3, dim=1)
    told = generalized_jsd(with_tail(at.log_softmax(-1).gather(1, ids)), with_tail(teacher), 0.5)
    told.sum().backward()
    assert at.grad is not None
    assert float(told.detach().abs().max()) < 1e-6 and float(at.grad.abs().max()) < 1e-6


def test_a_tail_at_the_floor_still_pulls() -> None:
    """A student that is sure of the teacher's first token learns that the teacher leaves mass elsewhere."""
    at = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.9]]).log()
    generalized_jsd(with_tail(at.log_softmax(-1)[:, :1]), with_tail(teacher), 0.0).sum().backward()
    assert at.grad is not None
    assert torch.isfinite(at.grad).all() and float(with_tail(at.detach().log_softmax(-1)[:, :1])[0, 1].exp()) == (
        pytest.approx(TAIL_FLOOR)
    )


def test_a_step_without_trained_tokens_is_zero() -> None:
    this = step(3)
    batch = replace(this.batch, loss_mask=torch.zeros_like(this.batch.loss_mask))
    objective = Distillation(options(sft_coef=1.0))
    stats = objective.prepare(batch)
    none = torch.zeros(0, 3, requires_grad=True)
    values = {name: value[:0] for name, value in stats.values.items()}
    out = objective.loss(Outputs(none[:, 0], candidates=none), values, stats.weights[:0], stats)
    out.loss.backward()
    assert float(out.loss.detach()) == 0 and not bool(stats.live_rows.any())


def test_what_is_missing_is_named() -> None:
    objective = Distillation(options())
    with pytest.raises(ValueError, match="extras teacher_ids, teacher_logprobs"):
        objective.prepare(rows())
    this = step(3)
    stats = objective.prepare(this.batch)
    with pytest.raises(ValueError, match=r"Outputs\.candidates"):
        objective.loss(Outputs(torch.zeros(2)), {}, torch.zeros(2), stats)
    with pytest.raises(ValueError, match="beta is 1.5"):
        generalized_jsd(torch.zeros(1, 2), torch.zeros(1, 2), 1.5)
