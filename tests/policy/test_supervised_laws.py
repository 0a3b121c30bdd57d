"""Supervised steps on ranks: weights, z-loss and text are the same for any layout and rows, and equal Hugging Face in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from nemo_rl_like.spec.policy import LayoutSpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.algorithms.oracle.supervised import cross_entropy
from tests.policy.ranks import run_ranks
from tests.policy.supervised_ranks import VOCAB, all_of, text_batch, weighted_batch
from tests.tiny_folders import save_llama

ONE = LayoutSpec()
LAYOUTS = [(ONE, "shared_prefix", 4096), (ONE, "padded", 24), (ONE, "packed", 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), VOCAB)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Metrics at every layout of one rank, and the joint gradient's difference."""
    got: tuple[Any, Any] = run_ranks(all_of, 1, tmp_path_factory.mktemp("one"), folder, LAYOUTS, ONE)
    return got


def equal(got: dict[str, float], want: dict[str, float]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        # What comes after an optimizer step carries Adam's division by small moments.
        assert got[name] == pytest.approx(value, rel=1e-4 if name.startswith("after/") else 2e-6, abs=1e-6), name


def exact(folder: Path, batch: TokenBatch, weights: torch.Tensor, z_loss: float) -> float:
    """The loss from Hugging Face's logits, row by row."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits, targets, shares = [], [], []
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        ids = batch.tokens[start:end]
        with torch.no_grad():
            table = model(ids[None]).logits[0, :-1]
        trained = batch.loss_mask[start + 1 : end]
        logits += table[trained].tolist()
        targets += ids[1:][trained].tolist()
        shares += weights[start + 1 : end][trained].tolist()
    return cross_entropy(logits, targets, shares, z_loss)


def test_rows_and_passes_change_nothing(found: tuple[list[dict[str, float]], dict[str, float]]) -> None:
    for other in found[0][1:]:
        equal(other, found[0][0])


def test_losses_equal_hugging_face_in_float64(
    found: tuple[list[dict[str, float]], dict[str, float]], folder: Path
) -> None:
    batch, text = weighted_batch(), text_batch()
    seen = found[0][0]
    want = exact(folder, batch, batch.extras["weight"], 0.01)
    assert seen["loss"] == pytest.approx(want, abs=1e-5) == seen["eval/loss"]
    want = exact(folder, text, torch.ones(text.tokens.numel()), 0.0)
    assert seen["ptx/loss"] == pytest.approx(want, abs=1e-5) == seen["text/loss"]
    assert seen["after/loss"] < seen["text/loss"]


def check_joint(joint: dict[str, float]) -> None:
    assert joint["difference"] <= 1e-6 * max(1.0, joint["mine"], joint["text"])
    assert min(joint["mine"], joint["text"]) > 1e-3


def test_the_joint_gradient_is_the_sum_of_both(found: tuple[list[dict[str, float]], dict[str, float]]) -> None:
    check_joint(found[1])


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=["dp", "tp", "pp"])
def test_two_ranks_do_what_one_does(
    axes: dict[str, int], found: tuple[list[dict[str, float]], dict[str, float]], folder: Path, tmp_path: Path
) -> None:
    layout = LayoutSpec.model_validate(axes)
    layouts = [(layout, "shared_prefix", 40)]
    (seen,), joint = run_ranks(all_of, 2, tmp_path, folder, layouts, layout)
    equal(seen, found[0][0])
    check_joint(joint)
