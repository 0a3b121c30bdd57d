"""No process and no shared memory of vLLM outlives the process that owns the engine."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.generation import vllm_plugin
from nemo_rl_like.generation.segments import descendants, mapped_inodes, unlink_segments

from .tiny_models import save, tiny_llama


def alive(pids: set[int]) -> set[int]:
    """Those that still run. (Process ids are not used again so soon.)"""
    running = set()
    for pid in pids:
        try:
            if b") Z" not in Path(f"/proc/{pid}/stat").read_bytes():
                running.add(pid)
        except OSError:
            continue
    return running


def wait_for_end(pids: set[int], seconds: float) -> set[int]:
    """Those that still run after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.service
@pytest.mark.parametrize("when", ["running", pytest.param("starting", marks=pytest.mark.slow)])
def test_vllm_dies_with_its_owner_and_leaves_no_shared_memory(tmp_path: Path, when: str) -> None:
    files = set(os.listdir("/dev/shm"))
    save(tiny_llama(), tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("vllm_owner.py")), str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    family: set[int] = set()
    try:
        if when == "running":
            assert owner.stdout is not None and any(line == "ready\n" for line in owner.stdout)
            assert not set(os.listdir("/dev/shm")) - files, "the names go once the engine runs"
        while len(family := descendants(owner.pid)) < (3 if when == "running" else 2):
            assert owner.poll() is None
            time.sleep(0.1)
        names = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in family}
        assert when == "starting" or {b"VLLM::EngineCore", b"VLLM::Worker"} <= names
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        assert not wait_for_end(family, 10 if when == "running" else 60)
        assert not set(os.listdir("/dev/shm")) - files
    finally:
        for pid in alive(family | {owner.pid}):
            os.kill(pid, signal.SIGKILL)


def test_an_engine_without_its_plugin_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_plugin.require_registered()
    monkeypatch.setattr(vllm_plugin, "NAME", "another")
    with pytest.raises(InputError, match="'another'.*install the package again"):
        vllm_plugin.require_registered()


def test_a_process_whose_owner_is_gone_already_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = "from nemo_rl_like.generation.vllm_plugin import register; register()"
    env = os.environ | {vllm_plugin.OWNER_ENV: str(gone.pid)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -signal.SIGKILL


def test_what_tensor_parallel_ranks_share_loses_its_name_and_keeps_its_memory() -> None:
    """vLLM's CPU ranks make it without Python's helper process, which therefore must not be told."""
    path = Path(f"/dev/shm/vllm_dist_{os.getpid()}-tp:0-[0-1]-cpushm_0")
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        assert unlink_segments(mapped_inodes([os.getpid()])) == []
        assert not path.exists() and memory[:2] == b"xx"
