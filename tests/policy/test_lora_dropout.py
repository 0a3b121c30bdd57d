"""Dropout of adapters: PEFT's gradient with the same masks at any layout, in training passes alone, and the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.model.dropout import channel_keys, kept, token_keys
from nemo_rl_like.policy.gap import GapExceeded, GapLimit
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec, PolicySpec, RecomputeSpec
from tests.policy.ranks import of_any_layout, run_ranks, state_of
from tests.policy.test_laws import BETA1, make_batch
from tests.policy.test_lora_laws import Folders, by_peft, largest, log_probs, make, member, peft_of, saved

LORA = LoraSpec(rank=3, alpha=6.0, dropout=0.4)
Found = tuple[list[dict[str, Any]], tuple[dict[str, float], str]]
SEED = 5
"""Of `member`'s adapters."""
NUMBERS = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "o_proj": 3, "gate_proj": 4, "up_proj": 5, "down_proj": 6}
MLP = RecomputeSpec(kind="selective", modules=("mlp",))
ONE_RANK = (
    PolicySpec(lora=LORA),
    PolicySpec(lora=LORA, micro_batch_tokens=24, recompute=RecomputeSpec()),
    PolicySpec(lora=LORA, rows="packed", micro_batch_tokens=24),
    PolicySpec(lora=LORA, rows="padded", micro_batch_tokens=40, recompute=MLP),
)
TWO_RANKS = (
    PolicySpec(lora=LORA, layout=LayoutSpec(dp=2), micro_batch_tokens=24),
    PolicySpec(lora=LORA, layout=LayoutSpec(tp=2, sp=True), recompute=RecomputeSpec()),
    PolicySpec(lora=LORA, layout=LayoutSpec(pp=2, vpp=2), rows="packed", micro_batch_tokens=12, recompute=MLP),
    PolicySpec(lora=LORA, layout=LayoutSpec(cp=2), rows="padded", micro_batch_tokens=40),
)
FOUR_RANKS = (
    PolicySpec(lora=LORA, layout=LayoutSpec(tp=2, sp=True, pp=2), micro_batch_tokens=12, recompute=RecomputeSpec()),
    PolicySpec(lora=LORA, layout=LayoutSpec(dp=2, cp=2), rows="padded"),
)


class Masked(nn.Module):
    """In the place of PEFT's dropout: masks of the row that is passed."""

    mask: Tensor

    def __init__(self, layer: int, projection: int) -> None:
        super().__init__()
        self.site = (layer, projection)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask / (1 - LORA.dropout)


def with_masks(folders: Folders) -> nn.Module:
    """PEFT's model, which drops as the first update does; rows must be passed in order, whole."""
    model, batch = peft_of(folders), make_batch()
    sites = []
    for name, module in model.named_modules():
        if name.endswith("lora_dropout"):
            layer, projection = int(name.split(".layers.")[1].split(".")[0]), name.split(".")[-2]
            module["default"] = Masked(layer + 1, NUMBERS[projection])
            sites.append((module["default"], model.get_submodule(name.removesuffix(".lora_dropout")).in_features))
    assert len(sites) == 4 * 7
    rows = iter(token_keys(batch, SEED, 0, 1).split(batch.lengths.tolist()))

    def draw(*_: object) -> None:
        row = next(rows)
        for site, width in sites:
            site.mask = kept(row, channel_keys(*site.site, 0, width, torch.device("cpu")), LORA.dropout)[None]

    model.register_forward_pre_hook(draw)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make(tmp_path_factory.mktemp("dropout"), LORA)


def steps(rank: int, world: int, port: int, folders: Folders, policies: tuple[PolicySpec, ...]) -> list[dict[str, Any]]:
    """Two updates of each layout, the second also after a resume, and what passes without gradient see before and after."""
    out = []
    for policy in policies:
        this, batch = member(rank, world, port, folders, policy), make_batch()
        this.load(str(folders.checkpoint), None)
        found: dict[str, Any] = {
            "before": log_probs(this, batch),
            "metrics": this.train_step(batch, None, CrossEntropy()),
        }
        moments = state_of(this)
        found["gradients"] = {
            k.removeprefix("exp_avg/"): v / (1 - BETA1) for k, v in moments.items() if k.startswith("exp_avg/")
        }
        folder = saved(this, folders.checkpoint.parent / f"saved-{world}-{len(out)}")
        other = member(rank, world, port, folders, policy)
        other.load(str(folder), 1)
        found["after"] = [log_probs(one, batch) for one in (this, other)]
        found["again"] = [this.train_step(batch, None, CrossEntropy()), other.train_step(batch, None, CrossEntropy())]
        out.append(found)
    return out  # fmt: skip


def check(made: list[dict[str, Any]], folders: Folders) -> None:
    batch = make_batch()
    undropped, _, _ = by_peft(peft_of(folders), batch)
    _, loss, gradients = by_peft(with_masks(folders), batch)
    for got in made:
        assert float((got["before"] - undropped).abs().max()) <= 1e-5
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert largest(got["gradients"], gradients) <= 1e-5
        assert torch.equal(*got["after"]) and got["again"][0] == got["again"][1]
        assert of_any_layout(got["again"][0]) == pytest.approx(of_any_layout(made[0]["again"][0]), rel=1e-4)


def gaps(rank: int, world: int, port: int, folders: Folders) -> tuple[dict[str, float], str]:
    """Metrics of an update on tokens that an engine without dropout sampled, and what one says that sampled with other weights."""
    this, batch = member(rank, world, port, folders, ONE_RANK[2]), make_batch()
    this.load(str(folders.checkpoint), None)
    batch.behavior.copy_(log_probs(this, batch))
    seen = this.train_step(batch, None, CrossEntropy(), gap=GapLimit(1e-4, 0))
    batch.behavior.sub_(0.5)
    with pytest.raises(GapExceeded) as caught:
        this.train_step(batch, None, CrossEntropy(), gap=GapLimit(1e-4, 0))
    return seen, str(caught.value)


def one_rank(rank: int, world: int, port: int, folders: Folders) -> Found:
    """What `steps` and `gaps` find."""
    return steps(rank, world, port, folders, ONE_RANK), gaps(rank, world, port, folders)


@pytest.fixture(scope="module")
def found(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Found:
    made: Found = run_ranks(one_rank, 1, tmp_path_factory.mktemp("one"), folders)
    return made


def test_dropped_adapters_are_pefts_with_the_same_masks_for_any_rows(folders: Folders, found: Found) -> None:
    check(found[0], folders)


def test_dropped_adapters_are_pefts_with_the_same_masks_over_two_ranks(folders: Folders, tmp_path: Path) -> None:
    check(run_ranks(steps, 2, tmp_path, folders, TWO_RANKS), folders)


@pytest.mark.slow
def test_dropped_adapters_are_pefts_with_the_same_masks_over_four_ranks(folders: Folders, tmp_path: Path) -> None:
    check(run_ranks(steps, 4, tmp_path, folders, FOUR_RANKS), folders)


def test_the_gap_to_the_engine_is_that_of_passes_without_dropout(found: Found) -> None:
    seen, told = found[1]
    assert seen["gap/max"] <= 1e-5 and told


def test_dropout_beside_dora_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"`dropout` is 0.1, but `dora` scales the layer's own product"):
        LoraSpec(dropout=0.1, dora=True)
