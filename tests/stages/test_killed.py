"""Killed anywhere and resumed = never killed: same weights, same optimizer, same episodes, same metric lines."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from nemo_rl_like.checkpoint.layout import verify
from tests.stages.killing import (
    Outcome,
    finish,
    kill_tree,
    outcome,
    run_id_of,
    start,
    wait_until_gone,
    write_spec,
)

pytestmark = [pytest.mark.service, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def unharmed(folder: Path) -> tuple[Outcome, float]:
    """The run that nobody kills, and its wall time in seconds."""
    output = folder / "unharmed"
    began = time.monotonic()
    assert finish(["run", str(write_spec(folder, output))], folder / "unharmed.log") == 0, (
        folder / "unharmed.log"
    ).read_text()
    return outcome(output), time.monotonic() - began


def check(folder: Path, output: Path, want: Outcome) -> None:
    got = outcome(output)
    assert got.weights == want.weights, (folder / f"{output.name}.log").read_text()[-3000:]
    assert got.episodes == want.episodes
    assert got.metrics == want.metrics


def survive(folder: Path, name: str, delays: list[float], want: Outcome) -> list[str]:
    """Start, kill the tree after each delay and start again; says where each kill landed."""
    output = folder / name
    arguments = ["run", str(write_spec(folder, output)), "--resume"]
    landed = []
    for delay in delays:
        process = start(arguments, folder / f"{name}.log")
        time.sleep(delay)
        run_id = run_id_of(output)
        landed.append(_where(output) if process.poll() is None else "ended")
        kill_tree(process, run_id)
        if run_id is not None:
            left = wait_until_gone(run_id)
            assert not left, f"left over: {left}"
            assert not [f for f in os.listdir("/dev/shm") if run_id[:10] in f]
    assert (
        finish(["resume", str(output)] if (output / "spec.yaml").exists() else arguments, folder / f"{name}.log") == 0
    )
    check(folder, output, want)
    return landed


def _where(output: Path) -> str:
    root = output / "rl" / "checkpoints"
    done = sorted(int(p.parent.name.split("_")[1]) for p in root.glob("step_*/manifest.json"))
    return f"after checkpoint {done[-1]}" if done else "before the first checkpoint"


def test_killed_at_any_time_is_never_killed(folder: Path, unharmed: tuple[Outcome, float]) -> None:
    """Three kills at times drawn uniformly over the measured run, the first of them surely before the first checkpoint."""
    want, seconds = unharmed
    seed = int(os.environ.get("NRL_KILL_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"NRL_KILL_SEED={seed}, run of {seconds:.1f} s")
    draw = random.Random(seed)
    delays = [draw.uniform(0, seconds * 0.4), *(draw.uniform(0, seconds) for _ in range(2))]
    landed = survive(folder, "timed", delays, want)
    print(list(zip(delays, landed, strict=True)))
    assert "before the first checkpoint" in landed


@pytest.mark.parametrize(
    "fault", ["checkpoint.mid_shard:3", pytest.param("checkpoint.before_manifest:2", marks=pytest.mark.slow)]
)
def test_killed_inside_a_save_is_never_killed(folder: Path, unharmed: tuple[Outcome, float], fault: str) -> None:
    survive_fault(folder, fault, unharmed[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["episode.mid:5", "sync.mid:4", "optimizer.mid:7", "optimizer.mid:1", "checkpoint.mid_shard:1"]
)
def test_killed_at_a_named_point_is_never_killed(folder: Path, unharmed: tuple[Outcome, float], fault: str) -> None:
    survive_fault(folder, fault, unharmed[0])


@pytest.mark.parametrize(
    "fault", ["checkpoint.mid_shard:2", pytest.param("checkpoint.before_manifest:2", marks=pytest.mark.slow)]
)
def test_killed_while_a_save_is_written_in_the_background_is_never_killed(
    folder: Path, unharmed: tuple[Outcome, float], fault: str
) -> None:
    survive_fault(folder, fault, unharmed[0], "stages.rl.checkpoint.asynchronous=true")


def survive_fault(folder: Path, fault: str, want: Outcome, *overrides: str) -> None:
    """The process that arrives at the point kills itself; the run ends with an error that names it, and is resumed."""
    name = "-".join([fault.replace(":", "-").replace(".", "-"), *(o.rpartition(".")[2] for o in overrides)])
    output = folder / name
    arguments = ["run", str(write_spec(folder, output)), *overrides]
    code = finish(arguments, folder / f"{name}.log", fault=fault)
    assert code in (1, -9), (folder / f"{name}.log").read_text()[-2000:]
    run_id = run_id_of(output)
    assert run_id is not None
    assert not wait_until_gone(run_id)
    assert finish([*arguments, "--resume"], folder / f"{name}.log") == 0, (folder / f"{name}.log").read_text()[-2000:]
    check(folder, output, want)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_are_none(folder: Path, unharmed: tuple[Outcome, float]) -> None:
    want, seconds = unharmed
    seed = int(os.environ.get("NRL_KILL_SEED", random.SystemRandom().randrange(1 << 30)))
    draw = random.Random(seed)
    print(f"NRL_KILL_SEED={seed}")
    for round_number in range(4):
        delays = [draw.uniform(0, seconds) for _ in range(5)]
        print(survive(folder, f"timed-{round_number}", delays, want))


@pytest.mark.slow
def test_optimizer_and_reference_in_host_memory_are_the_same_run(folder: Path, unharmed: tuple[Outcome, float]) -> None:
    output = folder / "on-host"
    arguments = ["run", str(write_spec(folder, output)), "policy.offload={optimizer: true, frozen: true}"]
    assert finish(arguments, folder / "on-host.log") == 0, (folder / "on-host.log").read_text()[-2000:]
    check(folder, output, unharmed[0])


def test_the_same_seed_is_the_same_run_whatever_the_order_of_environments(
    folder: Path, unharmed: tuple[Outcome, float]
) -> None:
    """Three environment processes, whose answers come in any order, against the one of the first run."""
    output = folder / "again"
    arguments = ["run", str(write_spec(folder, output)), "environment.processes=3"]
    assert finish(arguments, folder / "again.log") == 0, (folder / "again.log").read_text()[-2000:]
    check(folder, output, unharmed[0])


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_goes_on_from_it(
    folder: Path, unharmed: tuple[Outcome, float]
) -> None:
    """The second save's first shard finds no space: the run says so, keeps step 2, and leaves nothing half-written."""
    output, log = folder / "full", folder / "full.log"
    arguments = ["run", str(write_spec(folder, output))]
    assert finish(arguments, log, fault="checkpoint.mid_shard:3:enospc") == 1, log.read_text()[-2000:]
    told = log.read_text()
    assert "error: " in told and "is full" in told and "Earlier checkpoints are untouched" in told
    root = output / "rl" / "checkpoints"
    assert [p.name for p in root.iterdir()] == ["step_2"]
    assert verify(root / "step_2").step == 2
    assert finish(["resume", str(output)], log) == 0, log.read_text()[-2000:]
    check(folder, output, unharmed[0])


def test_a_stop_signal_saves_and_exits_with_75_and_is_resumed(folder: Path, unharmed: tuple[Outcome, float]) -> None:
    output = folder / "stopped"
    arguments = ["run", str(write_spec(folder, output))]
    process = start(arguments, folder / "stopped.log")
    end = time.monotonic() + 120
    while not (output / "rl" / "metrics.jsonl").exists() or not (output / "rl" / "metrics.jsonl").read_text():
        assert time.monotonic() < end and process.poll() is None, (folder / "stopped.log").read_text()
        time.sleep(0.1)
    process.terminate()
    assert process.wait(120) == 75, (folder / "stopped.log").read_text()
    steps = [json.loads(line)["step"] for line in (output / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] < 8
    assert finish(["resume", str(output)], folder / "stopped.log") == 0
    got = outcome(output)
    assert (got.weights, got.episodes, got.metrics) == (unharmed[0].weights, unharmed[0].episodes, unharmed[0].metrics)
