"""Laws of a save that ends early: by SIGKILL at any named point, or by a full disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl_like.artifacts import faults
from nemo_rl_like.checkpoint.layout import DiskFull, ModelIdentity
from nemo_rl_like.checkpoint.reader import CheckpointReader
from nemo_rl_like.checkpoint.shards import section_writer
from nemo_rl_like.checkpoint.writer import CheckpointWriter

MODEL = ModelIdentity("a" * 64, "llama")
SAVE_TWICE = """
import sys, torch
from pathlib import Path
from nemo_rl_like.checkpoint.layout import ModelIdentity
from nemo_rl_like.checkpoint.shards import section_writer
from nemo_rl_like.checkpoint.writer import CheckpointWriter
for step in (1, 2):
    with CheckpointWriter(Path(sys.argv[1]), step, ModelIdentity("a" * 64, "llama")) as writer:
        with section_writer(writer.begin(), "weights", shard_bytes=4096) as shards:
            for i in range(4):
                shards.add(f"w{i}", torch.full((1024,), float(step)))
        writer.commit({"step": step}, shards.files)
"""


def save(root: Path, step: int, count: int = 1024) -> Path:
    with CheckpointWriter(root, step, MODEL) as writer:
        with section_writer(writer.begin(), "weights", shard_bytes=1 << 16) as shards:
            for i in range(4):
                shards.add(f"w{i}", torch.full((count,), float(step)))
        return writer.commit({"step": step}, shards.files)


def assert_latest_is(root: Path, step: int) -> None:
    reader = CheckpointReader.latest(root)
    assert reader is not None and reader.step == step
    assert reader.state == {"step": step}
    assert all(reader.tensors("weights")[f"w{i}"].unique().tolist() == [float(step)] for i in range(4))


@pytest.mark.parametrize("fault", ["checkpoint.mid_shard:6", "checkpoint.before_manifest:2"])
def test_a_save_killed_anywhere_leaves_the_one_before(tmp_path: Path, fault: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVE_TWICE, str(tmp_path)],
        env={**os.environ, faults.ENV: fault},
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "the killed save must have left something behind"
    assert_latest_is(tmp_path, 1)
    save(tmp_path, 2)
    assert_latest_is(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_1", "step_2"]


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    faults._arrivals.clear()
    yield monkeypatch
    faults._arrivals.clear()


@pytest.mark.parametrize("point", ["checkpoint.mid_shard", "checkpoint.before_manifest"])
def test_a_full_disk_is_one_clear_error_and_leaves_nothing_half_written(
    tmp_path: Path, armed: pytest.MonkeyPatch, point: str
) -> None:
    save(tmp_path, 1)
    armed.setenv(faults.ENV, f"{point}:1:enospc")
    with pytest.raises(DiskFull, match=r"free.*checkpoint\.keep_last"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert_latest_is(tmp_path, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a small tmpfs needs root")
    tried = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if tried.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {tried.stderr.decode()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_really_full_disk_leaves_the_last_checkpoint_loadable(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    save(root, 1)
    with pytest.raises(DiskFull, match="bytes are free"):
        save(root, 2, count=1 << 17)
    assert [p.name for p in root.iterdir()] == ["step_1"]
    assert_latest_is(root, 1)
    save(root, 3)
    assert_latest_is(root, 3)
