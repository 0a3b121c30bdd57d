"""Experts that one pass chose are chosen again after the weights have moved, in any rows and layout, as transformers computes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.policy.walk import Walk
from nemo_rl_like.spec.optimizer import SgdOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec, RecomputeSpec, RouterSpec
from nemo_rl_like.tokens.batch import EXPERTS, TokenBatch
from tests.model import tiny
from tests.policy.ranks import context_of, run_ranks, save_checkpoint

pytestmark = pytest.mark.timeout(400)
LAYERS, EXPERTS_PER_TOKEN = 4, 2
LEARNING_RATE = 0.3
"""High enough that an update moves tokens to other experts."""
REPLAY = RouterSpec(replay="first_pass")
ONE = [PolicySpec(rows=kind, micro_batch_tokens=16, router=REPLAY) for kind in ("packed", "padded", "shared_prefix")]
TWO = [
    PolicySpec(layout=layout, micro_batch_tokens=16, router=REPLAY, recompute=RecomputeSpec())
    for layout in (
        LayoutSpec(dp=2, ep=2),
        LayoutSpec(pp=2, vpp=2),
        LayoutSpec(tp=2, sp=True, ep=2, etp=1),
        LayoutSpec(cp=2),
    )
]


@dataclass(frozen=True)
class Found:
    """What a policy did."""

    experts: Tensor
    """[N, layers, k] of the first pass."""
    chosen: Tensor
    """float32 [N] log-probs after an update with the router's own choice."""
    replayed: Tensor
    """The same with the experts of the first pass."""
    before: dict[str, Tensor]
    """Weights after that update, by Hugging Face name."""
    gradients: dict[str, Tensor]
    """Of the loss on those weights, with the experts of the first pass."""


def replayed(rank: int, world: int, port: int, folder: Path, scratch: Path, policies: list[PolicySpec]) -> list[Found]:
    """Each policy records, moves, and replays. The first one's moved weights stay under `scratch`."""
    found = []
    for number, policy in enumerate(policies):
        member = PolicyRank(
            context_of(policy.layout, rank, world, port), folder=str(folder), policy=policy, dtype="float32"
        )
        member.start_training(SgdOptimizer(lr=LEARNING_RATE, momentum=0.0, clip_grad=0.0), 10)
        batch = tiny.make_batch()
        rows = batch.trained_per_row > 0
        experts = member._walk(batch, rows, Walk(1.0, experts="recorded"), training=False).experts
        assert experts is not None
        again = batch.with_extras(**{EXPERTS: experts})
        member.train_step(batch, None, CrossEntropy())
        save_checkpoint(member, scratch / f"{world}-{number}", 1)
        before = weights(member)
        chosen, same = (
            member._walk(again, rows, Walk(1.0, experts=how), training=False).logprobs for how in ("chosen", "replayed")
        )
        member.train_step(again, None, CrossEntropy())
        gradients = {name: (before[name] - value) / LEARNING_RATE for name, value in weights(member).items()}
        found.append(Found(experts.view(-1, LAYERS, EXPERTS_PER_TOKEN), chosen, same, before, gradients))
    return found


def weights(member: PolicyRank) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in member.backend.store.weights() if value is not None}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    tiny.make_model("qwen3_moe").save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def found(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """One rank with each kind of rows, then each layout of two ranks."""
    one = run_ranks(replayed, 1, tmp_path_factory.mktemp("one"), scratch / "model", scratch, ONE)
    return [*one, *run_ranks(replayed, 2, tmp_path_factory.mktemp("two"), scratch / "model", scratch, TWO)]


def inputs(batch: TokenBatch) -> Tensor:
    """bool [N] tokens that a pass reads: those before the last trained one of their row."""
    read = torch.zeros(batch.tokens.numel(), dtype=torch.bool)
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        trained = batch.loss_mask[start:stop].nonzero()
        read[start : start + int(trained[-1] if len(trained) else 0)] = True
    return read


def of_transformers(folder: Path, batch: TokenBatch, held: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """float64 log-probs [N] and experts [N, layers, k] of each row by itself, and the gradients of their mean; `held` are to be chosen."""
    model = tiny.hugging_face(folder, torch.float64)
    experts = torch.full((batch.tokens.numel(), LAYERS, EXPERTS_PER_TOKEN), -1)
    logprobs = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    start = 0

    def choose(layer: int) -> Any:
        def hook(router: Any, inputs: tuple[Tensor], outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, _, best = outputs
            span = slice(start, start + len(logits))
            experts[span, layer] = best
            if held is None:
                return outputs
            kept = torch.where(held[span, layer] >= 0, held[span, layer].long(), best)
            return logits, logits.softmax(-1).gather(1, kept), kept

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(choose(number))
    loss = torch.zeros((), dtype=torch.float64)
    for begin, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        start, row = begin, batch.tokens[begin:stop]
        said = model(input_ids=row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
        mask = batch.loss_mask[begin + 1 : stop]
        logprobs[begin + 1 : stop] = torch.where(mask, said.detach(), 0.0)
        loss = loss - said[mask].sum() / int(batch.loss_mask.sum())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs, experts, tiny.as_on_disk(gradients, "qwen3_moe")


def test_the_first_pass_records_the_experts_of_every_token_that_it_reads(found: list[Found], scratch: Path) -> None:
    batch = tiny.make_batch()
    expected = of_transformers(scratch / "model", batch, None)[1].sort(-1).values
    expected[~inputs(batch)] = -1
    for got in found:
        assert torch.equal(got.experts.long().sort(-1).values, expected)


def test_moved_weights_with_the_experts_of_before_are_those_of_transformers(found: list[Found], scratch: Path) -> None:
    batch, moved = tiny.make_batch(), scratch / "1-0" / "step_1" / "weights"
    own = of_transformers(moved, batch, None)[0]
    logprobs, _, gradients = of_transformers(moved, batch, found[0].experts)
    assert (own - logprobs).abs().max() > 1e-2, "the update must have moved tokens to other experts"
    for got in found:
        assert max(float((got.before[name] - value).abs().max()) for name, value in found[0].before.items()) <= 1e-5
        assert (got.chosen - own).abs().max() <= 2e-5
        assert (got.replayed - logprobs).abs().max() <= 2e-5
        for name, gradient in gradients.items():
            assert (got.gradients[name] - gradient).abs().max() <= 2e-5 * max(1.0, float(gradient.abs().max())), name
