"""No process and no shared memory of vLLM outlives the process that owns the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.generation import vllm_plugin

from .tiny_models import save, tiny_llama


def _marked(mark: str) -> list[int]:
    """Live processes whose environment holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            alive = entry.name.isdigit() and b") Z" not in (entry / "stat").read_bytes()
            if alive and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _wait_until_none(mark: str, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.service
@pytest.mark.parametrize("when", ["running", "starting"])
def test_vllm_dies_with_its_owner_and_leaves_no_shared_memory(tmp_path: Path, when: str) -> None:
    files = set(os.listdir("/dev/shm"))
    mark = f"NRL_TEST_MARK={uuid.uuid4().hex}"
    save(tiny_llama(), tmp_path)
    owner = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("vllm_owner.py")), str(tmp_path)],
        env=os.environ | dict([mark.split("=")]),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        if when == "running":
            assert owner.stdout is not None and any(line == "ready\n" for line in owner.stdout)
        else:
            while len(_marked(mark)) < 2:
                assert owner.poll() is None
                time.sleep(0.1)
        family = _marked(mark)
        assert len(family) >= (3 if when == "running" else 2), "the engine core and a worker are processes of their own"
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        left = _wait_until_none(mark, 10 if when == "running" else 60)
        assert not left
        assert not set(os.listdir("/dev/shm")) - files
    finally:
        for pid in _marked(mark):
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
