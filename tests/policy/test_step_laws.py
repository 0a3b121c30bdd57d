"""Laws of one optimizer step and of the state between steps, each against float64 or against the same step made otherwise."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from nemo_rl_like.policy.gap import RATIO_METRICS
from nemo_rl_like.spec.policy import LayoutSpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.policy.ranks import run_ranks
from tests.policy.step_laws import PLAIN, UPDATES, loaded, one_rank, rows_of_updates, saved
from tests.policy.test_laws import TEMPERATURE, VOCAB, make_batch, make_folder
from tests.tiny_folders import save_biased_qwen2

PLANNING = {"rank.py:_walk", "rank.py:_passes", "rank.py:train_step"}
"""Which rows to walk and how many they are: the batch's own fields, on the CPU by contract."""
PLANNING_FILES = {"layouts.py", "attention_layouts.py", "batch.py", "aggregation.py", "gap.py"}
"""Read nothing but the batch's own fields: plans of micro-batches, counts, weights and the mask of the gap."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose projections have biases."""
    return save_biased_qwen2(tmp_path_factory.mktemp("biased"), VOCAB)


@pytest.fixture(scope="module")
def made(folder: Path, biased: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found for every law of a single rank."""
    found: dict[str, Any] = run_ranks(one_rank, 1, tmp_path_factory.mktemp("ranks"), folder, biased)
    return found


@pytest.mark.parametrize("index", [0, 1], ids=["on-policy", "recomputed under padded rows and other micro-batches"])
def test_at_step_0_the_ratio_is_1_and_the_kl_is_0(made: dict[str, Any], index: int) -> None:
    metrics = made["step 0"][index]
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    for name in ("kl", "kl/k1", "approx_kl", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert abs(metrics[name]) <= 1e-6, name


def reference_updates(folder: Path, batch: TokenBatch) -> tuple[list[tuple[float, ...]], float]:
    """(low, high) clip fractions and the 1 %, 50 %, 99 % and 100 % quantiles of the ratio of each update by Hugging Face's model and torch's AdamW in float64, and the least distance
    of a ratio from a bound that would clip it."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PLAIN.lr, betas=PLAIN.betas, eps=PLAIN.eps, weight_decay=0.0)
    with torch.no_grad():
        start = current_log_probs(model, batch)
    fractions, margin = [], float("inf")
    for rows in rows_of_updates(batch):
        chosen = torch.zeros(batch.rows, dtype=torch.bool)
        chosen[rows if rows is not None else slice(None)] = True
        mask = batch.loss_mask & chosen[batch.row_of_token]
        current = current_log_probs(model, batch)
        ratio = (current - start).exp()[mask]
        advantage = batch.extras["advantages"].double()[mask]
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        x = (current - start)[mask]
        count = int(mask.sum())
        optimizer.zero_grad()
        ((policy + 0.1 * ((-x).exp() - 1 + x)).sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), PLAIN.clip_grad)
        optimizer.step()
        low, high = (ratio < 0.8) & (advantage < 0), (ratio > 1.2) & (advantage > 0)
        ordered = sorted(ratio.tolist())
        quantiles = [ordered[min(count - 1, int(q * count))] for q in (0.01, 0.5, 0.99, 1.0)]
        fractions.append((float(low.sum()) / count, float(high.sum()) / count, *quantiles))
        margin = min(margin, float(torch.stack([(ratio - 0.8).abs().min(), (ratio - 1.2).abs().min()]).min().detach()))
    return fractions, margin


def current_log_probs(model: LlamaForCausalLM, batch: TokenBatch) -> torch.Tensor:
    """float64 [N], 0 where nothing predicts a token."""
    cuts = batch.cu_seqlens.tolist()
    parts = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        ids = batch.tokens[start:end]
        table = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        scored = table.gather(1, ids[1:, None])[:, 0]
        parts.append(torch.cat([scored.new_zeros(1), scored]))
    return torch.cat(parts)


def test_four_updates_clip_what_the_float64_reference_clips(made: dict[str, Any], folder: Path) -> None:
    want, margin = reference_updates(folder, make_batch())
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean", *RATIO_METRICS)
    got = [tuple(m[name] for name in names) for m in made["updates"]]
    assert len(got) == len(want) == UPDATES
    assert want[0][:2] == (0.0, 0.0) and min(sum(w[:2]) for w in want[1:]) > 0, want
    assert margin > 1e-4, "a ratio stands on a bound; the comparison would be a matter of rounding"
    for g, w in zip(got, want, strict=True):
        assert g[:2] == pytest.approx(w[:2], abs=1e-6)
        assert g[2:] == pytest.approx(w[2:], abs=1e-4)


def test_weight_decay_moves_matrices_and_never_norms_or_biases(made: dict[str, Any]) -> None:
    before, after = made["decay"]
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if name.endswith(("bias", "norm.weight"))}
    assert any(name.endswith("bias") for name in still) and "model.norm.weight" in still
    for name in before.keys() - still:
        assert torch.allclose(after[name], before[name] * (1 - 0.1 * 0.5), atol=1e-7), name


@pytest.mark.parametrize(("law", "words"), [("gap", "the limit on p99 is 0.001"), ("nan", "not finite")])
def test_a_refused_step_changes_no_weight_and_no_later_step(made: dict[str, Any], law: str, words: str) -> None:
    found = made[law]
    assert words in found["error"]
    for name, tensor in found["before"].items():
        assert torch.equal(tensor, found["after"][name]), name
        assert torch.equal(found["next"][name], found["fresh"][name]), name
    assert any(not torch.equal(t, found["next"][name]) for name, t in found["before"].items())


def test_a_step_makes_one_copy_from_the_device(made: dict[str, Any]) -> None:
    copies: Counter[str] = made["copies"]
    device_path = {
        place: count
        for place, count in copies.items()
        if place not in PLANNING and place.split(":")[0] not in PLANNING_FILES and not place.endswith(":prepare")
    }
    assert device_path == {"rank.py:_report": 1}, copies
    assert copies["rank.py:_passes"] == 2 and copies["rank.py:train_step"] == 1, (
        "rows.nonzero().tolist(), live_rows.sum()"
    )


def test_a_checkpoint_of_tp_2_goes_on_the_same_at_pp_2_dp_2_and_one_rank(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    losses = run_ranks(saved, 2, tmp_path, folder, root)
    (tmp_path / "one").mkdir()
    losses["one rank"] = run_ranks(loaded, 1, tmp_path / "one", folder, root, LayoutSpec())
    first, second = losses.pop("tp=2")
    assert abs(first - second) > 1e-3, "a step that changes nothing proves nothing"
    for name, got in losses.items():
        assert got == pytest.approx([first, second], abs=1e-6), name
