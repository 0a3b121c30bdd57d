"""Our losses against those of TRL's own `GRPOTrainer._compute_loss`, called with log-probs in the place of a model.

Where TRL's differs on purpose, the case says so: its entropy bonus is always a token mean; its truncated importance weight leaves the KL
alone, where ours weighs it too; its advantages add 1e-4 to the std, ours 1e-6.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from nemo_rl_like.algorithms.objectives import Outputs
from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows

LENGTHS = (4, 7, 2, 5, 6, 6)
WIDTH = max(LENGTHS)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"aggregation": {"kind": "sequence_mean_token_mean"}}, {"loss_type": "grpo"}),
    "bnpo": ({}, {"loss_type": "bnpo"}),
    "dapo": ({}, {"loss_type": "dapo"}),
    "clip-higher": ({"policy_loss": {"kind": "clip", "high": 0.28}}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "two-sided": ({"policy_loss": {"kind": "clip", "delta": 1.3}}, {"loss_type": "dapo", "delta": 1.3}),
    "dr_grpo": ({"aggregation": {"kind": "sequence_mean_token_sum_norm"}}, {"loss_type": "dr_grpo"}),
    "cispo": ({"policy_loss": {"kind": "cispo", "cap": 1.2}}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    "sapo": (
        {"policy_loss": {"kind": "sapo"}, "aggregation": {"kind": "sequence_mean_token_mean"}},
        {"loss_type": "sapo"},
    ),
    "gspo": (
        {"policy_loss": {"kind": "gspo", "low": 0.05, "high": 0.05}, "aggregation": {"kind": "sequence_mean"}},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05},
    ),
    "kl": ({"kl": {"coef": 0.1, "estimator": "k3"}}, {"loss_type": "dapo", "beta": 0.1}),
    "unbiased kl": (
        {"kl": {"coef": 0.1, "estimator": "k3", "unbiased": True}},
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "entropy bonus": ({"entropy_coef": 0.02}, {"loss_type": "dapo", "entropy_coef": 0.02}),
    "top entropy": ({"top_entropy": 0.2}, {"loss_type": "dapo", "top_entropy_quantile": 0.2}),
    "truncated importance": ({"correction": [{"kind": "tis", "cap": 1.1}]}, {"loss_type": "dapo", "cap": 1.1}),
    "off-policy mask": (
        {"correction": [{"kind": "off_policy_mask", "delta": 0.02}]},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    ),
}


def numbers(name: str, scale: float, shift: float = 0.0) -> Tensor:
    """float64 [rows, width], the same for a name."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(len(LENGTHS), WIDTH, generator=draw, dtype=torch.float64).float().double() * scale + shift


MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
PROXIMAL = numbers("proximal", 0.5, -1.5).float().double()
CURRENT = (PROXIMAL + numbers("current", 0.3)).float().double()
REFERENCE = (PROXIMAL + numbers("reference", 0.3)).float().double()
SAMPLING = (PROXIMAL + numbers("sampling", 0.15)).float().double()
ENTROPY = numbers("entropy", 0.3, 1.0).abs().float().double()
ADVANTAGES = numbers("advantages", 1.0)[:, 0].float().double()


def trl_loss(current: Tensor, settings: dict[str, Any]) -> Tensor:
    """TRL's loss of the whole batch in one pass."""
    given = {
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "entropy_coef": 0.0,
        "delta": None,
        "use_bias_correction_kl": False,
        "cap": None,
        **settings,
    }
    reduce = lambda x, *args, **kwargs: x
    trainer = SimpleNamespace(
        **given,
        args=SimpleNamespace(
            delta=given["delta"],
            use_bias_correction_kl=given["use_bias_correction_kl"],
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=reduce, gather_for_metrics=reduce, reduce=reduce, sync_gradients=True,
            pad_across_processes=reduce,
        ),
        use_vllm=given["cap"] is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=WIDTH,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=given["entropy_coef"] != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (current, ENTROPY, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    )  # fmt: skip
    trainer.get_high_entropy_mask = lambda *args: GRPOTrainer.get_high_entropy_mask(trainer, *args)
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64),
        "completion_mask": MASK.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": PROXIMAL,
        "sampling_per_token_logps": SAMPLING,
        "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": MASK.sum(),
    }
    if given["cap"] is not None:
        inputs["importance_sampling_ratio"] = (PROXIMAL - SAMPLING).exp().clamp(max=given["cap"])
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def our_batch(behavior: Tensor) -> TokenBatch:
    """The same numbers as a batch."""
    rows = []
    for i, n in enumerate(LENGTHS):
        at = lambda values, i=i, n=n: [0.0, *values[i, :n].tolist()]
        rows.append(
            Row(
                tokens=[1] * (n + 1),
                prompt_len=1,
                loss_mask=[False] + [True] * n,
                behavior=at(behavior),
                version=[0] * (n + 1),
                prompt_id=i,
                group_id=i,
                episode_id=i,
                rewards={"reward": 1.0},
                extras={
                    "proximal": at(PROXIMAL),
                    "reference": at(REFERENCE),
                    "entropy": at(ENTROPY),
                    "current": at(CURRENT),
                    "advantages": [0.0] + [float(ADVANTAGES[i])] * n,
                },
            )
        )
    return batch_rows(rows)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_trls(name: str) -> None:
    block, settings = CASES[name]
    theirs_at = CURRENT.clone().requires_grad_()
    theirs = trl_loss(theirs_at, settings)
    theirs.backward()
    objective = PolicyGradient(AlgorithmSpec.model_validate(block), max_new_tokens=WIDTH)
    batch = our_batch(PROXIMAL if "unbiased" in name else SAMPLING)
    stats, index = objective.prepare(batch), batch.loss_mask.nonzero()[:, 0]
    ours_at = CURRENT.clone().requires_grad_()
    values = {k: v[index].double() if v.is_floating_point() else v[index] for k, v in stats.values.items()}
    out = objective.loss(Outputs(ours_at[MASK], ENTROPY[MASK]), values, stats.weights[index].double(), stats)
    out.loss.backward()
    torch.testing.assert_close(out.loss, theirs, atol=1e-7, rtol=1e-6)
    assert ours_at.grad is not None and theirs_at.grad is not None
    torch.testing.assert_close(ours_at.grad, theirs_at.grad, atol=1e-8, rtol=1e-5)
