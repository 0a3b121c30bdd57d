"""Laws of the folder check: right folders pass at any layout, wrong ones do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_like.artifacts.errors import InputError, NrlError
from nemo_rl_like.model import check
from nemo_rl_like.model.check import check_folder


def changed(folder: Path, target: Path, changes: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(folder, target)
    save_file({**load_file(folder / "model.safetensors"), **changes}, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_right_folder_passes_over_two_by_two_ranks(folders: dict[str, Path]) -> None:
    report = check_folder(folders["qwen3"], tp=2, pp=2)
    assert report.ok
    assert report.round_trip_equal
    assert 0 < report.max_logit_diff <= 1e-5 * max(1.0, report.max_abs_logit)
    assert report.max_abs_logit > 1
    assert json.loads(report.to_json())["unmapped_keys"] == []


def test_a_right_folder_with_capped_scores_passes(folders: dict[str, Path]) -> None:
    assert check_folder(folders["gemma2"], tp=2).ok


@pytest.mark.slow
def test_a_right_folder_of_experts_passes_over_two_by_two_ranks(folders: dict[str, Path]) -> None:
    report = check_folder(folders["mixtral"], tp=2, ep=2)
    assert report.ok and report.round_trip_equal and (report.tp, report.ep) == (2, 2)


def test_expert_ranks_of_a_dense_model_are_an_input_error(folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="llama model, which has no experts"):
        check_folder(folders["llama"], ep=2)


def test_a_folder_that_means_something_else_fails(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(folders["llama"] / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    other = changed(folders["llama"], tmp_path / "other", {name: weights[name].roll(1, dims=0)})
    theirs = check._hugging_face
    monkeypatch.setattr(check, "_hugging_face", lambda _, adapter, tokens, dtype: theirs(other, adapter, tokens, dtype))
    report = check_folder(folders["llama"])
    assert not report.ok
    assert report.max_logit_diff > 0.1


def test_keys_without_a_place_are_reported(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["llama"], tmp_path / "more", {"model.vision.weight": torch.zeros(2)})
    report = check_folder(folder)
    assert not report.ok
    assert report.unmapped_keys == ("model.vision.weight",)


def test_a_wrong_shape_is_an_input_error_before_ranks_start(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["llama"], tmp_path / "shape", {"model.norm.weight": torch.ones(3)})
    with pytest.raises(InputError, match=r"model.norm.weight has shape \[3\]"):
        check_folder(folder)


def test_a_layout_that_does_not_fit_is_an_input_error(folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="layout.tp is 3"):
        check_folder(folders["llama"], tp=3)


def test_ranks_that_take_too_long_are_named_and_ended(folders: dict[str, Path]) -> None:
    with pytest.raises(NrlError, match=r"did not end in 0 s; ranks \[0\] were still running"):
        check_folder(folders["llama"], timeout_s=0.01)
