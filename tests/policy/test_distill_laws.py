"""Distillation on ranks: what a teacher tells and what a student learns are the same for any layout, and equal Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from nemo_rl_like.spec.policy import LayoutSpec
from tests.algorithms.oracle import distill as oracle
from tests.policy.distill_ranks import TEMPERATURE, K, conversations, learned, taught
from tests.policy.preference_ranks import VOCAB
from tests.policy.ranks import of_any_layout, run_ranks
from tests.tiny_folders import save_llama

LAYOUTS = [
    (LayoutSpec(), "shared_prefix", 4096),
    (LayoutSpec(), "padded", 12),
    (LayoutSpec(), "packed", 12),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Student, and a teacher of another depth."""
    student = save_llama(tmp_path_factory.mktemp("student"), VOCAB)
    return student, save_llama(tmp_path_factory.mktemp("teacher"), VOCAB, layers=4)


@pytest.fixture(scope="module")
def found(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one rank sees at every kind of rows."""
    got: list[dict[str, Any]] = run_ranks(taught, 1, tmp_path_factory.mktemp("one"), *folders, LAYOUTS)
    return got


def equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert torch.equal(got["extras"]["teacher_ids"], want["extras"]["teacher_ids"])
    torch.testing.assert_close(got["extras"]["teacher_logprobs"], want["extras"]["teacher_logprobs"], atol=1e-5, rtol=0)
    assert got["metrics"].keys() == want["metrics"].keys()
    for name, value in of_any_layout(want["metrics"]).items():
        assert got["metrics"][name] == pytest.approx(value, abs=2e-5, rel=1e-4), name


def test_rows_and_passes_change_nothing(found: list[dict[str, Any]]) -> None:
    for other in found[1:]:
        equal(other, found[0])


@pytest.mark.parametrize(
    "layout",
    [LayoutSpec(tp=2), LayoutSpec(pp=2), LayoutSpec(dp=2), LayoutSpec(cp=2)],
    ids=["tp 2", "pp 2", "dp 2", "cp 2"],
)
def test_layouts_change_nothing(
    found: list[dict[str, Any]], folders: tuple[Path, Path], layout: LayoutSpec, tmp_path: Path
) -> None:
    (got,) = run_ranks(taught, 2, tmp_path, *folders, [(layout, "shared_prefix", 24)])
    equal(got, found[0])


def test_each_teacher_tells_its_own_rows(found: list[dict[str, Any]]) -> None:
    batch, (first, second) = conversations(), found[0]["parts"]
    whole = found[0]["extras"]["teacher_logprobs"]
    of_token = batch.columns["teacher"][batch.row_of_token]
    assert not first[of_token == 1].any() and not second[of_token == 0].any()
    torch.testing.assert_close(first + second, whole, atol=1e-5, rtol=0)
    assert not whole[~batch.loss_mask].any() and bool((whole[batch.loss_mask] < 0).all())


def test_loss_and_learning_equal_hugging_face_and_the_oracle(
    found: list[dict[str, Any]], folders: tuple[Path, Path]
) -> None:
    models = [LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    batch = conversations()
    divergence, nll, count = 0.0, 0.0, 0
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        ids = batch.tokens[start:end]
        with torch.no_grad():
            student, teacher = (model(ids[None]).logits[0].tolist() for model in models)
        for place in range(start, end):
            if bool(batch.loss_mask[place]):
                at = place - start - 1
                told = oracle.log_softmax(teacher[at], TEMPERATURE)
                kept = sorted(range(VOCAB), key=lambda v: -float(told[v]))[:K]
                assert found[0]["extras"]["teacher_ids"][place].tolist() == kept
                divergence += float(oracle.gkd_top_k(student[at], teacher[at], kept, 0.3, TEMPERATURE))
                nll -= float(oracle.log_softmax(student[at], TEMPERATURE)[int(batch.tokens[place])])
                count += 1
    metrics = found[0]["metrics"]
    assert metrics["eval/nll"] == pytest.approx(nll / count, abs=1e-5)
    for name in ("eval/loss", "loss"):
        assert metrics[name] == pytest.approx((divergence + 0.1 * nll) / count, abs=1e-5)
    assert metrics["after/loss"] < metrics["loss"]


@pytest.mark.slow
def test_wrong_answers_teach_what_the_teacher_says_of_them(folders: tuple[Path, Path], tmp_path: Path) -> None:
    found = run_ranks(learned, 1, tmp_path, *folders, 150)
    assert found["teacher"] < 0.5 < 1.5 < found["before"]
    assert found["taught"] < found["before"] - 1.0
    assert found["alone"] > found["before"] - 0.5
