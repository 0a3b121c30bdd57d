"""Preference losses against TRL 1.16's own code, called without a trainer, where it has the same loss.

Left out, since TRL's is another: bco with a delta (TRL has none), label smoothing of dpo (TRL's `sigmoid` ignores it), ipo with an
f-divergence (TRL divides the score by the length, not the log-ratio), rpo (TRL's `sft` divides by the tokens of the batch), and
orpo's and cpo's likelihood terms, which its trainers compute inside their forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from nemo_rl_like.algorithms.preference import objective_of
from nemo_rl_like.algorithms.preference_losses import Completions, Pairs, cpo, orpo, simpo
from nemo_rl_like.spec import preference as spec

from . import pairs
from .pairs import Side, Step
from .passes import with_metrics

OF_TRL = {
    "dpo": "sigmoid",
    "exo": "exo_pair",
    "nca": "nca_pair",
    "bco": "bco_pair",
    "sppo": "sppo_hard",
}
"""TRL's names, where they differ."""
DIVERGENCES = {"js": "js_divergence", "alpha": "alpha_divergence"}
BETA = 0.3


def table(sides: list[Side], name: str, dtype: torch.dtype) -> Tensor:
    """[2 P, 8]: a number a token, chosen ones first, after one prompt token; 0 where not trained."""
    out = torch.zeros(len(sides), 8, dtype=dtype)
    for row, side in enumerate([*sides[0::2], *sides[1::2]]):
        for t, (x, m) in enumerate(zip(getattr(side, name), side.trained, strict=True)):
            out[row, 1 + t] = x if m else 0.0
    return out


def by_trl(
    step: Step, kind: str, further: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, list[float]]]:
    """Loss and metrics of DPOTrainer on this step."""
    current, reference = (table(step.sides, name, dtype) for name in ("current", "reference"))
    mask = torch.zeros(current.shape, dtype=torch.int64)
    for row, side in enumerate([*step.sides[0::2], *step.sides[1::2]]):
        mask[row, 1 : 1 + len(side.trained)] = torch.tensor(side.trained).long()
    shift = current[:, 1:]
    outputs = SimpleNamespace(
        log_probs=shift,
        log_sum_sq_probs=table(step.sides, "collision", dtype)[:, 1:] + further.get("above", 0.0),
        entropy=torch.zeros_like(shift),
        mean_logits=torch.zeros_like(shift),
        is_top1=torch.zeros_like(shift, dtype=torch.bool),
    )
    ld_alpha = further.get("ld_alpha")
    weights = torch.ones_like(reference) if ld_alpha is None else tails(mask, ld_alpha)
    ref = (reference * weights).sum(1).chunk(2)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=ld_alpha,
        precompute_ref_logps=True,
        f_divergence_type=further.get("f_divergence_type", "reverse_kl"),
        f_alpha_divergence_coef=further.get("f_alpha_divergence_coef", 0.0),
        beta=BETA,
        label_smoothing=0.2,
        loss_types=[OF_TRL.get(kind, kind)],
        loss_weights=[1.0],
        args=SimpleNamespace(discopop_tau=0.05),
        use_weighting=further.get("wpo", False),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": ref[0],
        "ref_rejected_logps": ref[1],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss, trainer._metrics["train"]


def tails(mask: Tensor, alpha: float) -> Tensor:
    """1 up to the shorter completion's length, then `alpha`."""
    place, lengths = mask.cumsum(1), mask.sum(1)
    shorter = torch.minimum(*lengths.chunk(2)).repeat(2)
    return torch.where(place <= shorter[:, None], 1.0, alpha)


def ours(step: Step, **fields: Any) -> tuple[Tensor, dict[str, float]]:
    objective = objective_of(spec.PreferenceSpec.model_validate(fields))
    places = [step.batch.loss_mask.nonzero()[:, 0]]
    loss, _, metrics = with_metrics(objective, step.batch, step.current, places)
    return loss, metrics


def loss_of(kind: str) -> dict[str, Any]:
    smoothed = {"label_smoothing": 0.2} if kind in ("robust", "exo") else {}
    return {"kind": kind, "beta": BETA, **smoothed}


@pytest.mark.parametrize(
    "kind",
    ["dpo", "robust", "ipo", "hinge", "exo", "discopop", "sppo", "nca", "bco", "apo_zero", "apo_down"],
)
def test_losses_and_metrics_equal_trls(kind: str) -> None:
    step = pairs.pair_step(11)
    want, told = by_trl(step, kind, {})
    got, metrics = ours(step, losses=[loss_of(kind)])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    for name in metrics.keys() - {"loss"}:
        assert metrics[name] == pytest.approx(told[name][-1], abs=1e-5), name


@pytest.mark.parametrize("kind", ["dpo", "hinge", "discopop"])
@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_f_divergences_equal_trls(kind: str, divergence: str) -> None:
    step = pairs.pair_step(12)
    further = {"f_divergence_type": DIVERGENCES.get(divergence, divergence), "f_alpha_divergence_coef": 0.6}
    options: dict[str, Any] = {"kind": divergence} | ({"alpha": 0.4} if divergence == "alpha" else {})
    want, _ = by_trl(step, kind, further, torch.float32)  # float64 has no entry in TRL's table of clamps
    got, _ = ours(step, losses=[loss_of(kind)], f_divergence=options)
    torch.testing.assert_close(got.float(), want, atol=1e-5, rtol=1e-4)


def test_ld_dpo_and_wpo_equal_trls() -> None:
    step = pairs.pair_step(13)
    want, _ = by_trl(step, "dpo", {"ld_alpha": 0.3})
    got, _ = ours(step, losses=[loss_of("dpo")], ld_alpha=0.3)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    want, _ = by_trl(step, "dpo", {"wpo": True, "above": 2.0})  # below 1, where the paper's cap does nothing
    above = Step(step.sides, step.batch.with_extras(collision=step.batch.extras["collision"] + 2.0), step.places)
    got, _ = ours(above, losses=[loss_of("dpo")], wpo=True)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_kto_equals_trls() -> None:
    step = pairs.judged_step(14, count=5)
    half = len(step.sides) // 2
    logps = torch.tensor([sum(side.kept(side.current)) for side in step.sides], dtype=torch.float64)
    refs = torch.tensor([sum(side.kept(side.reference)) for side in step.sides], dtype=torch.float64)
    labels = torch.tensor([i % 3 != 1 for i in range(half)])
    outputs = SimpleNamespace(
        log_probs=logps[:half, None], entropy=torch.zeros(half, 1), mean_logits=torch.zeros(half, 1)
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        _compute_kl_logps=lambda model, batch: logps[half:],
        loss_type="kto",
        beta=BETA,
        desirable_weight=1.3,
        undesirable_weight=0.7,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    two = torch.ones(half, 2, dtype=torch.int64)
    inputs = {
        "input_ids": two,
        "attention_mask": two,
        "completion_mask": two,
        "label": labels,
        "ref_logps": refs[:half],
        "ref_KL_logps": refs[half:],
    }
    want = KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    options = {"kind": "kto", "beta": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    objective = objective_of(spec.PreferenceSpec.model_validate({"losses": [options]}))
    live = objective.prepare(step.batch).live_rows[step.batch.row_of_token] & step.batch.loss_mask
    got, _, metrics = with_metrics(objective, step.batch, step.current, [live.nonzero()[:, 0]])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    for name in metrics.keys() - {"loss"}:
        assert metrics[name] == pytest.approx(trainer._metrics["train"][name][-1], abs=1e-5), name


def test_what_simpo_cpo_and_orpo_do_beside_likelihood_equals_trls() -> None:
    means = torch.tensor([[-2.0, -0.3, -1.1], [-1.4, -2.2, -0.9]])
    ones = torch.ones(3)
    made = Pairs(Completions(means[0], ones, None), Completions(means[1], ones, None), spec.ReverseKl())
    trainer = SimpleNamespace(
        alpha=0.0,
        beta=2.0,
        loss_type="simpo",
        simpo_gamma=1.0,
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    torch.testing.assert_close(simpo(made, spec.SimpoLoss()), CPOTrainer.cpo_loss(trainer, *means)[0])
    trainer.loss_type = "sigmoid"
    torch.testing.assert_close(cpo(made, spec.CpoLoss(beta=2.0, alpha=0.0)), CPOTrainer.cpo_loss(trainer, *means)[0])
    odds = -ORPOTrainer.odds_ratio_loss(trainer, *means)[0]
    torch.testing.assert_close(orpo(made, spec.OrpoLoss(lam=2.0)) + means[0], odds)
