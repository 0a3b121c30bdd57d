"""Preference steps on ranks: the same for any layout and rows, equal to Hugging Face in float64, and they learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from nemo_rl_like.spec.policy import LayoutSpec
from tests.policy.preference_ranks import VOCAB, learned, losses, rows_of, sums
from tests.policy.ranks import run_ranks
from tests.tiny_folders import save_llama

LAYOUTS = [
    (LayoutSpec(), "shared_prefix", 4096),
    (LayoutSpec(), "padded", 24),
    (LayoutSpec(), "packed", 24),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), VOCAB)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Metrics at every layout of one rank."""
    got: list[dict[str, float]] = run_ranks(losses, 1, tmp_path_factory.mktemp("one"), folder, LAYOUTS)
    return got


def equal(got: dict[str, float], want: dict[str, float]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, abs=2e-5, rel=1e-4), name


def test_rows_and_passes_change_nothing(found: list[dict[str, float]]) -> None:
    for other in found[1:]:
        equal(other, found[0])


@pytest.mark.parametrize("layout", [LayoutSpec(tp=2), LayoutSpec(dp=2), LayoutSpec(cp=2)], ids=["tp 2", "dp 2", "cp 2"])
def test_layouts_change_nothing(
    found: list[dict[str, float]], folder: Path, layout: LayoutSpec, tmp_path: Path
) -> None:
    (got,) = run_ranks(losses, 2, tmp_path, folder, [(layout, "shared_prefix", 64)])
    equal(got, found[0])


def test_the_loss_with_every_option_equals_hugging_face_in_float64(found: list[dict[str, float]], folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batch = rows_of(sums(6, 1))
    aligned, means = [], []
    for start, end, prompt in zip(
        batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], batch.prompt_lens.tolist(), strict=False
    ):
        ids = batch.tokens[start:end]
        with torch.no_grad():
            table = model(ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = table.gather(1, ids[1:, None])[prompt - 1 :, 0]
        collision = (2 * table).logsumexp(-1)[prompt - 1 :]
        aligned.append(float((logprobs - collision).mean()))
        means.append(float(logprobs.mean()))
    want = 0.0
    for chosen, rejected, mean in zip(aligned[0::2], aligned[1::2], means[0::2], strict=True):
        # Both completions have three tokens, each .1 above the reference, so h = 0.
        want += min(1.0, math.exp(chosen + rejected)) * (math.log(2) - 0.5 * mean) / 6
    for name in ("loss", "eval/loss"):
        assert found[0][name] == pytest.approx(want, abs=1e-5)
    assert found[0]["eval/rewards/chosen"] == pytest.approx(0.1 * 0.3, abs=1e-5)


def test_ktos_first_pass_gives_z_in_training_and_validation(found: list[dict[str, float]]) -> None:
    # Every completion has three tokens, each .1 above the reference: u = z = .3.
    assert found[0]["kto/kl"] == pytest.approx(0.3, abs=1e-5)
    assert found[0]["kto/loss"] == pytest.approx(0.5, abs=1e-5)
    assert found[0]["kto_step/trained_rows"] == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"losses": [{"kind": "dpo", "beta": 0.5}]},
        {"losses": [{"kind": "simpo"}]},
    ],
    ids=["dpo", "simpo"],
)
def test_it_raises_the_held_out_accuracy_of_a_tiny_model(folder: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    before, after = run_ranks(learned, 1, tmp_path, folder, fields, 120)
    assert before < 0.75
    assert after > 0.9
