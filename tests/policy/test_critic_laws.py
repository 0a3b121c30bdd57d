"""A critic on Megatron: values, gradient and files equal to Hugging Face's sequence classifier, at any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from nemo_rl_like.algorithms.value_losses import ValueLoss
from nemo_rl_like.policy.rank import PolicyRank, Walk
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch, with_ends
from tests.policy.ranks import context_of, run_ranks, save_checkpoint, state_of
from tests.policy.test_laws import BETA1, VOCAB, make_batch, make_folder

CLIP = 0.2
LAYOUTS = (
    LayoutSpec(dp=2),
    LayoutSpec(tp=2),
    LayoutSpec(pp=2),
    LayoutSpec(pp=2, vpp=2),
    LayoutSpec(tp=2, sp=True),
    LayoutSpec(cp=2),
)


def save_classifier(folder: Path) -> Path:
    """A random classifier of one label on a small Llama."""
    torch.manual_seed(3)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(**shape, **heads, max_position_embeddings=64, num_labels=1, initializer_range=0.1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def asked() -> TokenBatch:
    """The policy's batch with returns and old values, the place after each row scored too."""
    gen = torch.Generator().manual_seed(5)
    batch = with_ends(make_batch())
    draw = lambda: torch.randn(batch.tokens.numel(), generator=gen)
    return batch.with_extras(returns=draw(), values=draw() * 0.1)


def reference(folder: Path, batch: TokenBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor, float]:
    """Gradients by Hugging Face name, values [N] and the loss, in float64, row by row."""
    model = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    cuts, found = batch.cu_seqlens.tolist(), torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(cuts, cuts[1:], strict=False):
        states = model.model(batch.tokens[start:end][None]).last_hidden_state[0]
        scores = model.score(states)[:, 0]
        for i in range(start + 1, end):
            if batch.loss_mask[i]:
                value, old, goal = scores[i - start - 1], batch.extras["values"][i], batch.extras["returns"][i]
                found[i] = value.detach()
                near = old + (value - old).clamp(-CLIP, CLIP)
                total = total + 0.5 * torch.maximum((value - goal) ** 2, (near - goal) ** 2)
    total = total / int(batch.loss_mask.sum())
    total.backward()
    return {n: p.grad.float() for n, p in model.named_parameters()}, found.float(), float(total.detach())


def member(rank: int, world: int, port: int, folder: Path, policy: PolicySpec, **more: Any) -> PolicyRank:
    """A rank of a critic."""
    layout = policy.layout
    place = context_of(layout, rank, world, port)
    return PolicyRank(place, folder=str(folder), policy=policy, dtype="float32", **more)


def steps(rank: int, world: int, port: int, folder: Path, policies: list[PolicySpec]) -> list[dict[str, Any]]:
    """One step at each policy spec."""
    out = []
    for policy in policies:
        critic, batch = member(rank, world, port, folder, policy), asked()
        values = critic._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False).logprobs
        critic.start_training(AdamWOptimizer(lr=1e-3, clip_grad=0.0, betas=(BETA1, 0.999)), 10)
        metrics = critic.train_step(batch, None, ValueLoss(CLIP))
        moments = state_of(critic)
        gradients = {
            name.removeprefix("exp_avg/"): value / (1 - BETA1)
            for name, value in moments.items()
            if value is not None and name.startswith("exp_avg/")
        }
        out.append({"metrics": metrics, "gradients": gradients, "values": values})
    return out


def check(made: list[dict[str, Any]], folder: Path) -> None:
    gradients, values, loss = reference(folder, asked())
    for got in made:
        assert got["gradients"].keys() == gradients.keys()
        assert max(float((got["gradients"][n] - gradients[n]).abs().max()) for n in gradients) <= 1e-5
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        assert got["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert float((got["values"] - values).abs().max()) <= 1e-5


def test_values_and_gradient_are_hugging_faces_for_any_rows(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    kinds = ("shared_prefix", "packed", "padded")
    policies = [PolicySpec(rows=kind, micro_batch_tokens=budget) for kind in kinds for budget in (4096, 20)]
    check(run_ranks(steps, 1, tmp_path, folder, policies), folder)


def test_values_and_gradient_are_hugging_faces_over_two_ranks(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model")
    check(run_ranks(steps, 2, tmp_path, folder, [PolicySpec(layout=layout) for layout in LAYOUTS]), folder)


def fresh(rank: int, world: int, port: int, folder: Path, target: Path) -> dict[str, Any]:
    """A critic made of a language model: its first values, then trained and saved."""
    critic, batch = member(rank, world, port, folder, PolicySpec(layout=LayoutSpec(pp=2)), score_head=True), asked()
    before = critic._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False).logprobs
    critic.start_training(AdamWOptimizer(lr=1e-2), 10)
    for _ in range(2):
        critic.train_step(batch, None, ValueLoss(None))
    after = critic._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False).logprobs
    save_checkpoint(critic, target, 2, ("critic-weights", "critic-optimizer"), "critic-")
    return {"before": before, "after": after}


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_becomes_a_critic_of_zeros_and_saves_as_a_classifier(tmp_path: Path, tied: bool) -> None:
    made = run_ranks(fresh, 2, tmp_path, make_folder(tmp_path / "model", tied), tmp_path / "saved")
    assert not made["before"].any()
    saved = tmp_path / "saved" / "step_2" / "critic-weights"
    model, told = LlamaForSequenceClassification.from_pretrained(saved, output_loading_info=True, dtype=torch.float64)
    assert model.config.num_labels == 1
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = replace(asked(), extras={})
    again = reference(saved, batch.with_extras(returns=torch.zeros(batch.tokens.numel()), values=made["after"]))[1]
    assert float((again - made["after"]).abs().max()) <= 1e-5
    assert float(made["after"].abs().max()) > 0.01
