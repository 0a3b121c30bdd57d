"""An export is a copy in bounded memory: its peak does not depend on the model's size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_io import SafetensorsReader, write_weights
from nemo_rl_like.tensors.shards import INDEX
from tests.export.copied import copy_whole

_MIB = 1 << 20
EXPORT = """
import resource, sys
from pathlib import Path
from tests.export.copied import copy_whole

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) << 10

limit = int(sys.argv[3]) or status("VmSize:") + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
copy_whole(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[4]))
print(status("VmHWM:"), status("VmPeak:"))
"""


def make_model(folder: Path, mib: int, tensor_mib: int, shard_mib: int) -> Path:
    """Random bfloat16 tensors of `mib` together, as the weights of a checkpoint are stored."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(mib)
    count = tensor_mib * _MIB // 2

    def tensors() -> object:
        for i in range(mib // tensor_mib):
            raw = torch.randint(0, 1 << 16, (count,), dtype=torch.int32, generator=generator).to(torch.int16)
            yield f"model.layers.{i}.weight", raw.view(torch.bfloat16).view(-1, 1024)

    write_weights(folder, tensors(), shard_mib * _MIB)  # type: ignore[arg-type]
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def peak_of_export(source: Path, target: Path, limit: int, shard_gib: float) -> int:
    """Peak resident bytes of a process that exports with at most `limit` bytes of address space (0: 64 MiB above what it starts with)."""
    command = [sys.executable, "-c", EXPORT, str(source), str(target), str(limit), str(shard_gib)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[0])


def assert_same_tensors(source: Path, target: Path) -> None:
    with SafetensorsReader(source) as mine, SafetensorsReader(target) as theirs:
        assert mine.keys() == theirs.keys()
        for name in mine.keys():
            assert torch.equal(mine.get(name).view(torch.int16), theirs.get(name).view(torch.int16))


@pytest.mark.parametrize("stored_mib", [16, 1024], ids=["many shards", "one file"])
def test_a_model_larger_than_the_memory_it_may_use_is_exported(tmp_path: Path, stored_mib: int) -> None:
    source = make_model(tmp_path / "model", 256, 8, stored_mib)
    peak_of_export(source, tmp_path / "out", 0, 100 / 1024)
    assert_same_tensors(source, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


@pytest.mark.slow
def test_two_and_six_gib_export_under_two_gib_with_one_peak(tmp_path: Path) -> None:
    peaks = []
    for gib in (2, 6):
        source = make_model(tmp_path / "model", gib * 1024, 64, 512)
        peaks.append(peak_of_export(source, tmp_path / "out", 2 << 30, 4.0))
        with safe_open(next((tmp_path / "out").glob("*.safetensors")), "pt") as shard:
            assert shard.keys()
        for folder in ("model", "out"):
            subprocess.run(["rm", "-rf", str(tmp_path / folder)], check=True)
    print(f"peak resident bytes of 2 and 6 GiB: {peaks}")
    assert peaks[1] <= 1.1 * peaks[0]


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def half_a_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def wrong_shape(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(re.sub(rb"\[4096,1024\]", b"[4095,1024]", raw, count=1))


def gone(file: Path) -> None:
    file.unlink()


def without_a_tensor(file: Path) -> None:
    index = file.parent / INDEX
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.layers.9.weight"] = file.name
    index.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_off, "its tensors end at byte"),
        (half_a_header, "not a whole safetensors file: its header"),
        (wrong_shape, r"shape \[4095, 1024\] cannot have 8388608 bytes"),
        (gone, "does not exist"),
        (without_a_tensor, r"lacks the tensor 'model\.layers\.9\.weight'"),
    ],
)
def test_damaged_weights_are_named_and_nothing_is_left(tmp_path: Path, damage: object, words: str) -> None:
    source = make_model(tmp_path / "model", 32, 8, 16)
    file = sorted(source.glob("*.safetensors"))[-1]
    damage(file)  # type: ignore[operator]
    with pytest.raises(InputError, match=words) as caught:
        copy_whole(source, tmp_path / "out")
    assert file.name in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
