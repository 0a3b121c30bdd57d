"""Tiny runs of `nrl` as a user would start them: writes their specs and data, kills the whole tree at any time, and compares what two
runs came to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nemo_rl_like.checkpoint.layout import verify

REWARD = """
def reward_func(prompts, responses, labels=None):
    return [sum(c == "1" for c in r) / max(1, len(r)) for r in responses]
"""
TINY = """
seed: 3
output: OUTPUT
model:
  init: {hidden_size: 64, intermediate_size: 96, layers: 2, heads: 2, kv_heads: 2, head_dim: 32, max_positions: 32}
  tokenizer: {characters: "0123456789+="}
policy: {threads_per_rank: 1}
"""
KILLED = """
environment: {reward: FOLDER/reward.py:reward_func, prompts: FOLDER/prompts.jsonl}
engine: {kind: ENGINE, kv_cache_gib: 0.05, threads: 1}
stages:
  - kind: rl
    steps: STEPS
    prompts_per_step: 4
    samples_per_prompt: 4
    updates_per_batch: 2
    sampling: {max_new_tokens: 6}
    algorithm: {kl: {coef: 0.05}}
    optimizer: {lr: 1.0e-3}
    checkpoint: {every_steps: 2, keep_last: 2}
"""


@dataclass(frozen=True)
class Outcome:
    """What must be equal, however often a run was killed."""

    weights: dict[str, str]
    """sha256 by file of the final checkpoint: weights and optimizer."""
    episodes: list[tuple[object, ...]]
    """(step, task, episode, sampled ids, reward) in the order of the record."""
    metrics: list[dict[str, float]]
    """Metric lines without timings."""


def write_tiny(output: Path, text: str, *, head: str = TINY, folder: Path | None = None) -> Path:
    """A spec in `folder`, by default beside its output: `text` under the `head` of a tiny model, FOLDER in both for that folder."""
    folder = folder or output.parent
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{output.name}.yaml"
    path.write_text((head + text).replace("OUTPUT", str(output)).replace("FOLDER", str(folder)))
    return path


def write_rows(path: Path, rows: Sequence[object]) -> None:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sums(folder: Path) -> None:
    """Prompts, and a reward function that likes ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    asked = [[{"role": "user", "content": f"{a}+{b}="}] for a in range(4) for b in range(5)]
    write_rows(folder / "prompts.jsonl", asked)


def first_digit_pairs() -> list[dict[str, str]]:
    """Pairs whose chosen answer repeats the prompt's first digit."""
    draw = random.Random(1)
    rows = []
    for a in range(10):
        for b in range(20):
            other = (a + draw.randint(1, 9)) % 10
            rows.append({"prompt": f"{a}+{b}=", "chosen": f"{a}{a}", "rejected": f"{other}{other}"})
    return rows


def metric_lines(stage: Path) -> list[dict[str, float]]:
    """The metric lines of a stage's folder without timings."""
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("timing/")} for line in lines]


def tensor_files(checkpoint: Path) -> dict[str, str]:
    """sha256 by file of all tensors of a checkpoint, which is verified."""
    return {f.path: f.sha256 for f in verify(checkpoint).files if f.path.endswith(".safetensors")}


def write_spec(folder: Path, output: Path, *, steps: int = 8, engine: str = "embedded") -> Path:
    """The run that is killed: GRPO on `write_sums`, with a reference and two updates a batch."""
    write_sums(folder)
    return write_tiny(output, KILLED.replace("ENGINE", engine).replace("STEPS", str(steps)), folder=folder)


def start(arguments: list[str], log: Path, fault: str | None = None) -> subprocess.Popen[bytes]:
    """`nrl` in a fresh session, with a small environment and its output in `log`."""
    env = {k: os.environ[k] for k in ("PATH", "HOME", "LANG", "PYTHONPATH") if k in os.environ}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ({"NRL_FAULT": fault} if fault else {})
    command = [str(Path(sys.executable).with_name("nrl")), *arguments]
    with log.open("ab") as stream:
        return subprocess.Popen(command, env=env, stdout=stream, stderr=stream, start_new_session=True)


def finish(arguments: list[str], log: Path, timeout_s: float = 300.0, fault: str | None = None) -> int:
    """Run `nrl` to its end; its exit code."""
    process = start(arguments, log, fault)
    try:
        return process.wait(timeout_s)
    finally:
        kill_tree(process)


def run_id_of(output: Path) -> str | None:
    """Id of the run's Ray session, once it has one."""
    path = output / "logs" / "session.json"
    return json.loads(path.read_text())["run_id"] if path.is_file() else None


def kill_tree(process: subprocess.Popen[bytes], run_id: str | None = None) -> None:
    """SIGKILL to the driver and everything that it started, Ray's detached processes included."""
    victims = {process.pid} | {child.pid for child in _children(process.pid)}
    if run_id is not None:
        victims |= {p.pid for p in processes_of(run_id)}
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)


def processes_of(run_id: str) -> list[psutil.Process]:
    """Live processes whose environment or command line names the run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            marked = process.environ().get("NRL_RUN_ID") == run_id or any(
                run_id[:10] in part for part in process.cmdline()
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if marked:
            found.append(process)
    return found


def wait_until_gone(run_id: str, seconds: float = 15.0) -> list[psutil.Process]:
    """What is left of a dead run after at most `seconds`."""
    end = time.monotonic() + seconds
    while (left := processes_of(run_id)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def outcome(output: Path, stage: str = "rl") -> Outcome:
    """What the run in `output` came to."""
    checkpoints = sorted((output / stage / "checkpoints").glob("step_*"), key=lambda p: int(p.name.split("_")[1]))
    manifest = json.loads((checkpoints[-1] / "manifest.json").read_text())
    files = {f["path"]: f["sha256"] for f in manifest["files"] if f["path"].startswith(("weights/", "optimizer/"))}
    rows = [json.loads(line) for line in (output / stage / "rollouts.jsonl").read_text().splitlines()]
    return Outcome(
        files,
        [(r["step"], r["task"], r["episode"], str(r["segments"]), r["reward"]) for r in rows],
        metric_lines(output / stage),
    )


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
