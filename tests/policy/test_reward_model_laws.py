"""Reward models on ranks: the loss and gradient of TRL's own RewardTrainer, at any layout and kind of rows; a drawn head is as asked."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification
from trl.trainer.reward_trainer import RewardTrainer

from nemo_rl_like.algorithms.reward_losses import objective_of
from nemo_rl_like.data.score_rows import pair_score_rows
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from nemo_rl_like.spec.reward_model import PairwiseReward
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows
from tests.policy.preference_ranks import RENDERER, VOCAB, sums
from tests.policy.ranks import run_ranks, state_of
from tests.policy.test_critic_laws import BETA1, member, save_classifier
from tests.tiny_folders import save_llama

LOSS = PairwiseReward(center=0.05)
KINDS = ("shared_prefix", "packed", "padded")


def batch() -> TokenBatch:
    return batch_rows(pair_score_rows(sums(6, 1), RENDERER, max_tokens=32).rows)


def steps(rank: int, world: int, port: int, folder: Path, policies: list[PolicySpec]) -> list[dict[str, Any]]:
    """Metrics and gradients of one step at each policy spec."""
    out = []
    for policy in policies:
        model = member(rank, world, port, folder, policy)
        model.start_training(AdamWOptimizer(lr=1e-3, clip_grad=0.0, betas=(BETA1, 0.999)), 10)
        metrics = model.train_step(batch(), None, objective_of(LOSS))
        out.append({"metrics": metrics, "gradients": gradients_of(model)})
    return out


def gradients_of(model: PolicyRank) -> dict[str, torch.Tensor]:
    """By Hugging Face name, from the first moment after one step."""
    moments = state_of(model)
    firsts = {n.removeprefix("exp_avg/"): v for n, v in moments.items() if v is not None and n.startswith("exp_avg/")}
    return {name: value / (1 - BETA1) for name, value in firsts.items()}


def by_trl(folder: Path) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, metrics and gradients of RewardTrainer in float64, on the same texts padded."""
    model = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    model.config.pad_token_id = RENDERER.tokenizer.pad_token_id
    rows = [list(row.tokens[:-1]) for row in pair_score_rows(sums(6, 1), RENDERER, max_tokens=32).rows]
    ordered = [torch.tensor(row) for row in (*rows[0::2], *rows[1::2])]
    ids = torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True, padding_value=model.config.pad_token_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ordered], batch_first=True)
    metrics: dict[str, list[float]] = defaultdict(list)
    trainer = SimpleNamespace(
        model=model.eval(),
        args=SimpleNamespace(center_rewards_coefficient=LOSS.center),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"eval": metrics},
        _total_train_tokens=0,
    )
    loss: Any = RewardTrainer.compute_loss(trainer, model, {"input_ids": ids, "attention_mask": mask})
    loss.backward()
    told = {name: metrics[name][0] for name in ("accuracy", "margin")}
    return float(loss), told, {n: p.grad.float() for n, p in model.named_parameters()}


def check(made: list[dict[str, Any]], folder: Path) -> None:
    loss, told, gradients = by_trl(folder)
    for got in made:
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        for name, value in told.items():
            assert got["metrics"][name] == pytest.approx(value, abs=1e-5), name
        assert got["gradients"].keys() == gradients.keys()
        assert max(float((got["gradients"][n] - gradients[n]).abs().max()) for n in gradients) <= 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


def test_a_step_is_trls_for_any_rows(folder: Path, tmp_path: Path) -> None:
    policies = [PolicySpec(rows=kind, micro_batch_tokens=budget) for kind in KINDS for budget in (4096, 20)]
    check(run_ranks(steps, 1, tmp_path, folder, policies), folder)


def test_a_step_is_trls_over_two_ranks(folder: Path, tmp_path: Path) -> None:
    layouts = [LayoutSpec(dp=2), LayoutSpec(tp=2), LayoutSpec(pp=2), LayoutSpec(cp=2)]
    check(run_ranks(steps, 2, tmp_path, folder, [PolicySpec(layout=layout) for layout in layouts]), folder)


def heads(rank: int, world: int, port: int, folder: Path) -> list[torch.Tensor]:
    """The score heads that seeds 1, 1 and 2 draw, and the one without a seed, on a model from a folder and on one from scratch."""
    found = []
    for scratch in (None, 7):
        for seed in (1, 1, 2, None):
            model = member(
                rank, world, port, folder, PolicySpec(), score_head=True, score_head_seed=seed, initialize=scratch
            )
            found.append(dict(model.backend.store.weights())["score.weight"])
    return found


def test_a_new_head_is_drawn_from_its_seed_and_is_zero_without_one(tmp_path: Path) -> None:
    made = run_ranks(heads, 1, tmp_path, save_llama(tmp_path / "model", VOCAB))
    for one, again, other, unseeded in (made[:4], made[4:]):
        assert torch.equal(one, again) and not torch.equal(one, other) and not unseeded.any()
        assert float(one.std()) == pytest.approx((one.numel() + 1) ** -0.5, rel=0.5)
