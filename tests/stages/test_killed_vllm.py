"""A run with vLLM, killed whole: it is resumed to the same prompts, seeds and log-probs, and nothing of it survives."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_like.data.tokenizer import character_tokenizer
from tests.stages.killing import finish, kill_tree, run_id_of, start, wait_until_gone, write_spec
from tests.tiny_folders import save_llama

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 4
SHARED = ("psm_", "sem.", "vllm_dist_", "ray", "plasma")
"""How the names begin that a run's processes give to shared memory."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained(save_llama(folder / "model", len(tokenizer), positions=32, head_dim=32))
    return folder


def arguments_of(folder: Path, output: Path) -> list[str]:
    """What `nrl` is told: four steps with vLLM, from weights in a folder."""
    spec = write_spec(folder, output, steps=STEPS, engine="vllm")
    return ["run", str(spec), f"model={{path: {folder / 'model'}}}"]


@dataclass(frozen=True)
class Run:
    """What a run came to."""

    episodes: list[dict[str, Any]]
    model: Any

    @classmethod
    def of(cls, output: Path) -> Run:
        lines = (output / "rl" / "rollouts.jsonl").read_text().splitlines()
        weights = output / "rl" / "checkpoints" / f"step_{STEPS}" / "weights"
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        return cls([json.loads(line) for line in lines], model)

    @property
    def samples(self) -> list[tuple[object, ...]]:
        """(step, task, episode, prompt and sampled ids, versions, reward) in the order of the record."""
        return [(e["step"], e["task"], e["episode"], str(e["segments"]), e["reward"]) for e in self.episodes]

    def log_probs(self, episodes: list[dict[str, Any]]) -> torch.Tensor:
        """Log-probs of every token that was sampled in the episodes, by this run's final weights."""
        found = []
        with torch.inference_mode():
            for segment in (segment for episode in episodes for segment in episode["segments"]):
                ids = torch.tensor(segment["prompt_ids"] + segment["ids"])
                table = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
                found.append(table.gather(1, ids[1:, None])[len(segment["prompt_ids"]) - 1 :, 0])
        return torch.cat(found)


def family(process: Any) -> set[psutil.Process]:
    """The driver and all that it started; by parents, since vLLM's processes hide their environment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        driver = psutil.Process(process.pid)
        return {driver, *driver.children(recursive=True)}
    return set()


def named(processes: set[psutil.Process], name: str) -> set[psutil.Process]:
    """Those whose command line begins with `name`."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline()).startswith(name):
                found.add(process)
    return found


def run_until(
    arguments: list[str], log: Path, ready: Callable[[set[psutil.Process]], bool], fault: str | None = None
) -> tuple[Any, set[psutil.Process]]:
    """Start `nrl` and return it with all its processes once `ready` says so of them."""
    process = start(arguments, log, fault)
    seen: set[psutil.Process] = set()
    end = time.monotonic() + 240
    while True:
        seen |= family(process)
        if ready(seen):
            return process, seen
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)


def assert_nothing_is_left(seen: set[psutil.Process], run_id: str | None, files: set[str]) -> None:
    """No process of a dead run, and no name in /dev/shm that was not there before it."""
    _, alive = psutil.wait_procs(seen, timeout=15)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert run_id is None or not wait_until_gone(run_id)
    end = time.monotonic() + 15
    while (left := {f for f in set(os.listdir("/dev/shm")) - files if f.startswith(SHARED)}) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left


def test_a_run_whose_whole_tree_is_killed_in_mid_sync_ends_as_one_that_nobody_kills(folder: Path) -> None:
    log, unharmed, killed = folder / "log", folder / "unharmed", folder / "killed"
    assert finish(arguments_of(folder, unharmed), log) == 0, log.read_text()
    files = set(os.listdir("/dev/shm"))

    def in_mid_sync(seen: set[psutil.Process]) -> bool:
        """vLLM's worker stands still half-way through the bytes of its fourth sync, and everybody waits for it."""
        return any(worker.status() == psutil.STATUS_STOPPED for worker in named(seen, "VLLM::Worker"))

    process, seen = run_until(arguments_of(folder, killed), log, in_mid_sync, fault="sync.mid:4:stop")
    run_id = run_id_of(killed)
    assert process.poll() is None and named(seen, "VLLM::EngineCore")
    kill_tree(process)  # the run's watchdog stands outside of it
    assert_nothing_is_left(seen, run_id, files)
    lines = (killed / "rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert finish(["resume", str(killed)], log) == 0, log.read_text()[-3000:]
    want, got = Run.of(unharmed), Run.of(killed)
    assert got.samples == want.samples
    gaps = (got.log_probs(want.episodes) - want.log_probs(want.episodes)).abs()
    assert gaps.numel() >= STEPS * 16 and float(gaps.max()) < 1e-3


@pytest.mark.parametrize("delay", [0.0, 4.0, 9.0, 14.0])
def test_a_run_that_is_killed_while_vllm_starts_leaves_nothing(folder: Path, delay: float) -> None:
    files = set(os.listdir("/dev/shm"))
    output, log = folder / f"starting-{delay}", folder / f"starting-{delay}.log"
    begun: list[float] = []

    def starting(seen: set[psutil.Process]) -> bool:
        """`delay` seconds have passed since vLLM's first process was seen."""
        engines = named(seen, "ray::WorkerHost")
        if not begun and any(child for engine in engines for child in children(engine)):
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() >= begun[0] + delay

    process, seen = run_until(arguments_of(folder, output), log, starting)
    seen |= family(process)
    run_id = run_id_of(output)
    kill_tree(process)  # the run's watchdog stands outside of it
    assert_nothing_is_left(seen, run_id, files)


def children(process: psutil.Process) -> list[psutil.Process]:
    """vLLM's processes below a Ray worker: Python's `spawn`, before they take their names."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [c for c in process.children(recursive=True) if any("spawn_main" in a for a in c.cmdline())]
    return []
