"""Laws of the checkpoint folder: what was committed comes back, and nothing that is damaged ever does."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.checkpoint.layout import MANIFEST, CheckpointError, ModelIdentity, verify
from nemo_rl_like.checkpoint.reader import CheckpointReader
from nemo_rl_like.checkpoint.retention import retain
from nemo_rl_like.checkpoint.shards import section_writer
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.tensors.shards import INDEX

MODEL = ModelIdentity("a" * 64, "llama, 5 layers, width 192")


def tensors(seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(32, 8, generator=made),
        "norm.weight": torch.randn(8, generator=made).bfloat16(),
        "scale": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(4, 6, generator=made).t(),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
    }


def save(
    root: Path,
    step: int,
    weights: Mapping[str, Tensor] | None = None,
    *,
    score: float | None = None,
    shard_bytes: int = 512,
) -> Path:
    with CheckpointWriter(root, step, MODEL) as writer:
        folder = writer.begin()
        with section_writer(folder, "weights", shard_bytes=shard_bytes) as shards:
            for name, tensor in (weights or tensors(step)).items():
                shards.add(name, tensor)
        return writer.commit({"step": step, "nested": {"x": 0.1}}, shards.files, score=score)


def test_tensors_and_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path, 3)
    reader = CheckpointReader.latest(tmp_path)
    assert reader is not None
    assert (reader.step, reader.state) == (3, {"step": 3, "nested": {"x": 0.1}})
    found = reader.tensors("weights")
    assert set(found) == set(tensors())
    for name, expected in tensors(3).items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)


def test_other_readers_of_safetensors_read_every_shard(tmp_path: Path) -> None:
    folder = save(tmp_path, 1) / "weights"
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    for name, file in weight_map.items():
        assert torch.equal(load_file(folder / file)[name], tensors(1)[name])


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), max_size=8), shard_bytes=st.integers(1, 2000))
def test_any_shard_size_holds_the_same_tensors(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard_bytes: int
) -> None:
    given_tensors = {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}
    root = tmp_path_factory.mktemp("any")
    with (
        CheckpointWriter(root, 0, MODEL) as writer,
        section_writer(writer.begin(), "optimizer", 2, shard_bytes) as shards,
    ):
        for name, tensor in given_tensors.items():
            shards.add(name, tensor)
        writer.commit({}, shards.close())
    found = CheckpointReader.open(root / "step_0").tensors("optimizer")
    assert {name: found[name].tolist() for name in found} == {k: v.tolist() for k, v in given_tensors.items()}
    assert all(len(s.tensors) == 1 or s.tensor_bytes <= shard_bytes for s in shards.files)


def test_several_writers_make_one_section(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1, MODEL) as writer:
        folder = writer.begin()
        written = []
        for part in range(3):
            shards = section_writer(folder, "weights", part)
            shards.add(f"w{part}", torch.full((2,), float(part)))
            written += shards.close()
        writer.commit({}, written)
    found = CheckpointReader.open(tmp_path / "step_1").tensors("weights")
    assert [found[f"w{part}"].tolist() for part in range(3)] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_one_name_from_two_writers_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1, MODEL) as writer:
        folder = writer.begin()
        written = []
        for part in range(2):
            shards = section_writer(folder, "weights", part)
            shards.add("w", torch.zeros(1))
            written += shards.close()
        with pytest.raises(CheckpointError, match="'w' is in"):
            writer.commit({}, written)
    assert CheckpointReader.latest(tmp_path) is None


def test_hash_while_writing_is_the_hash_of_the_file(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1, MODEL) as writer:
        folder = writer.begin()
        with section_writer(folder, "weights") as shards:
            for name, tensor in tensors().items():
                shards.add(name, tensor)
        (written,) = shards.files
        assert written.sha256 == sha256_file(folder / written.path)
        writer.commit({}, [written])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped bit": (lambda f: _flip(next((f / "weights").glob("*.safetensors"))), "SHA-256"),
    "cut file": (lambda f: (f / "state.json").write_text("{}"), r"state\.json has 2 bytes"),
    "missing file": (lambda f: (f / "weights" / INDEX).unlink(), INDEX),
    "missing manifest": (lambda f: (f / MANIFEST).unlink(), "did not finish"),
    "cut manifest": (lambda f: (f / MANIFEST).write_text('{"format": 1'), "cannot be read"),
    "other format": (lambda f: (f / MANIFEST).write_text('{"format": 99}'), "format 99"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    action, names = DAMAGE[damage]
    action(newest)
    with pytest.raises(CheckpointError, match=names):
        verify(newest)
    with caplog.at_level(logging.WARNING):
        reader = CheckpointReader.latest(tmp_path)
    assert reader is not None and reader.step == 1
    assert "step_2" in caplog.text


def test_a_renamed_folder_is_not_another_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_9")
    reader = CheckpointReader.latest(tmp_path)
    assert reader is not None and reader.step == 1


def test_latest_counts_steps_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path, step)
    reader = CheckpointReader.latest(tmp_path)
    assert reader is not None and reader.step == 10


def test_another_models_checkpoint_is_refused_by_both_names(tmp_path: Path) -> None:
    reader = CheckpointReader.open(save(tmp_path, 1))
    reader.require_model(MODEL)
    with pytest.raises(InputError, match=r"llama, 5 layers.*qwen3, 7 layers"):
        reader.require_model(ModelIdentity("b" * 64, "qwen3, 7 layers"))


def test_a_valid_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists and is valid"):
        save(tmp_path, 1)
    verify(folder)


def test_begin_removes_leftovers_and_replaces_a_damaged_step(tmp_path: Path) -> None:
    for name in (".tmp-step_7", ".trash-step_1-99"):
        (tmp_path / name / "weights").mkdir(parents=True)
    (save(tmp_path, 4) / MANIFEST).unlink()
    _flip(save(tmp_path, 5) / "state.json")
    save(tmp_path, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_5"]
    verify(tmp_path / "step_5")


def test_keep_last_and_keep_best(tmp_path: Path) -> None:
    for step, score in ((1, 0.9), (2, None), (3, float("nan")), (4, 0.2), (5, 0.9), (6, 0.1)):
        save(tmp_path, step, score=score)
    gone = retain(tmp_path, keep_last=1, keep_best=2)
    assert sorted(f.name for f in gone) == ["step_2", "step_3", "step_4"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_1", "step_5", "step_6"]


@pytest.mark.parametrize("damage", ["flipped bit", "cut file", "missing manifest"])
def test_the_newest_valid_checkpoint_is_never_deleted(tmp_path: Path, damage: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    DAMAGE[damage][0](tmp_path / "step_3")
    retain(tmp_path, keep_last=1)
    reader = CheckpointReader.latest(tmp_path)
    assert reader is not None and reader.step == 2
    assert not (tmp_path / "step_1").exists()


def test_a_type_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1, MODEL) as writer:
        shards = section_writer(writer.begin(), "weights")
        with pytest.raises(ValueError, match="complex64"):
            shards.add("z", torch.zeros(1, dtype=torch.complex64))
