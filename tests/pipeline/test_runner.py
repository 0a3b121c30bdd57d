"""Laws of running a pipeline: done is skipped, changed runs again with all below it, killed anywhere is never killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import InputError, OutputFolderError, SpecError, StoppedBySignal
from nemo_rl_like.pipeline.records import read_run, read_status
from nemo_rl_like.pipeline.resume import load_resumable
from nemo_rl_like.pipeline.run_folder import Start
from nemo_rl_like.pipeline.runner import RunResult, run_pipeline
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec, spec_hash
from tests.pipeline.counting import CLASSES, STOP, Interruption
from tests.pipeline.specs import chain, results

WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def run(spec: ExperimentSpec, start: Start = "resume") -> RunResult:
    return run_pipeline(spec, start=start, classes=CLASSES)


def actions(result: RunResult) -> dict[str, str]:
    return {s.name: s.action for s in result.stages}


def test_a_run_makes_every_artifact_and_records_it(tmp_path: Path) -> None:
    spec = chain(tmp_path / "run")
    result = run(spec, "new")
    assert actions(result) == dict.fromkeys(["sft", "rl", "evaluate", "export"], "run")
    status = read_status(tmp_path / "run")
    assert {r.state for r in status.stages.values()} == {"done"}
    assert status.stages["export"].output is not None
    assert (status.stages["export"].output.kind, status.stages["export"].output.path) == ("ServingBundle", "export/out")
    record = read_run(tmp_path / "run")
    assert record is not None
    assert record.starts[0].spec_hash == spec_hash(spec)
    assert record.starts[0].versions["nemo-rl-like"]
    assert load_spec(tmp_path / "run/spec.yaml") == spec


def test_a_run_to_a_stage_leaves_the_others_and_a_later_start_equals_one_that_never_stopped(tmp_path: Path) -> None:
    spec, whole = chain(tmp_path / "run"), chain(tmp_path / "whole")
    first = run_pipeline(spec, classes=CLASSES, until="rl")
    assert actions(first) == {"sft": "run", "rl": "run"}
    assert set(read_status(tmp_path / "run").stages) == {"sft", "rl"}
    assert actions(run(spec)) == {"sft": "skip", "rl": "skip", "evaluate": "run", "export": "run"}
    run(whole, "new")
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_a_last_stage_that_is_none_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--until is 'sftt', and the stages are sft, rl, evaluate, export"):
        run_pipeline(chain(tmp_path / "run"), classes=CLASSES, until="sftt")
    assert not (tmp_path / "run").exists()


def test_what_is_done_is_skipped_with_a_reason_and_not_touched(tmp_path: Path) -> None:
    spec = chain(tmp_path / "run")
    run(spec, "new")
    before = results(tmp_path / "run")
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("out/*")}
    result = run(spec)
    assert set(actions(result).values()) == {"skip"}
    assert all("done before" in s.reason for s in result.stages)
    assert results(tmp_path / "run") == before
    assert {p: p.stat().st_mtime_ns for p in times} == times


@pytest.mark.parametrize(
    ("change", "rerun", "reason"),
    [
        ({"stages": {"sft": {"steps": 4}}}, ["sft", "rl", "evaluate", "export"], "stage.steps: 3 -> 4"),
        (
            {"stages": {"rl": {"algorithm": {"policy_loss": {"kind": "clip", "high": 0.3}}}}},
            ["rl", "evaluate", "export"],
            "stage.algorithm.policy_loss.high",
        ),
        ({"stages": {"export": {"shard_gib": 1.0}}}, ["export"], "stage.shard_gib: 4.0 -> 1.0"),
        ({"seed": 2}, ["sft", "rl", "evaluate", "export"], "seed: 1 -> 2"),
        ({"environment": {"name": "x"}}, ["sft", "rl", "evaluate", "export"], "environment.name"),
        ({"engine": {"kind": "vllm"}}, ["rl", "evaluate", "export"], "engine.kind"),
        ({"policy": {"lora": {"rank": 4}}}, ["sft", "rl", "evaluate", "export"], "policy.lora.alpha: None -> 32.0"),
    ],
)
def test_what_changed_runs_again_together_with_all_that_builds_on_it(
    tmp_path: Path, change: dict[str, Any], rerun: list[str], reason: str
) -> None:
    run(chain(tmp_path / "run"), "new")
    changed = chain(tmp_path / "run", **change)
    result = run(changed)
    assert [name for name, action in actions(result).items() if action == "run"] == rerun
    first = next(s for s in result.stages if s.action == "run")
    assert reason in first.reason
    run(chain(tmp_path / "fresh", **change), "new")
    assert results(tmp_path / "run") == results(tmp_path / "fresh")


def test_how_a_stage_is_computed_does_not_run_it_again(tmp_path: Path) -> None:
    run(chain(tmp_path / "run"), "new")
    how = {"policy": {"layout": {"tp": 2}}, "cluster": {"devices": 8}, "logging": {"tensorboard": False}}
    spec = chain(tmp_path / "run", {"rl": {"checkpoint": {"every_steps": 1}, "show_samples": 0}}, **how)
    assert set(actions(run(spec)).values()) == {"skip"}


def test_a_named_file_counts_by_its_content(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("1")
    spec = chain(tmp_path / "run", {"sft": {"data": {"path": str(data)}}})
    run(spec, "new")
    os.utime(data, (1, 1))
    assert set(actions(run(spec)).values()) == {"skip"}
    data.write_text("2")
    assert set(actions(run(spec)).values()) == {"run"}
    data.unlink()
    with pytest.raises(InputError, match=r"`data\.path`.*does not exist"):
        run(spec)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_done_stage_whose_output_is_damaged_is_resumed(tmp_path: Path, damage: str) -> None:
    spec = chain(tmp_path / "run")
    run(spec, "new")
    before = results(tmp_path / "run")
    if damage == "missing":
        shutil.rmtree(tmp_path / "run/rl/out")
    else:
        (tmp_path / "run/rl/out/digest.txt").write_text("other")
    result = run(spec)
    assert actions(result) == {"sft": "skip", "rl": "resume", "evaluate": "skip", "export": "skip"}
    assert damage in result.stages[1].reason
    assert results(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("error", "state"), [(RuntimeError("out of memory"), "failed"), (STOP, "stopped"), (KeyboardInterrupt(), "stopped")]
)
def test_a_stage_that_ends_early_is_recorded_and_resumed(tmp_path: Path, error: BaseException, state: str) -> None:
    spec = chain(tmp_path / "run")
    Interruption.error = error
    with pytest.raises(type(error)):
        run(spec, "new")
    record = read_status(tmp_path / "run").stages["sft"]
    assert (record.state, record.attempts) == (state, 1)
    assert record.error is not None and type(error).__name__ in record.error
    assert actions(run(spec))["sft"] == "resume"
    run(chain(tmp_path / "fresh"), "new")
    assert results(tmp_path / "run") == results(tmp_path / "fresh")
    assert read_status(tmp_path / "run").stages["sft"].attempts == 2


def test_half_done_work_of_another_key_is_not_resumed(tmp_path: Path) -> None:
    Interruption.error = STOP
    with pytest.raises(StoppedBySignal):
        run(chain(tmp_path / "run"), "new")
    run(chain(tmp_path / "run", seed=5))
    run(chain(tmp_path / "fresh", seed=5), "new")
    assert results(tmp_path / "run") == results(tmp_path / "fresh")


def test_a_bad_spec_does_not_clear_the_run_that_it_would_overwrite(tmp_path: Path) -> None:
    run(chain(tmp_path / "run"), "new")
    before = results(tmp_path / "run")
    with pytest.raises(InputError, match="steps"):
        run(chain(tmp_path / "run", {"rl": {"steps": 13}}), "overwrite")
    with pytest.raises(OutputFolderError, match="--overwrite"):
        run(chain(tmp_path / "run"), "new")
    assert results(tmp_path / "run") == before


def test_overwriting_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    run(chain(tmp_path / "run", seed=9), "new")
    (tmp_path / "run/sft/extra").write_text("x")
    run(chain(tmp_path / "run"), "overwrite")
    run(chain(tmp_path / "fresh"), "new")
    assert results(tmp_path / "run") == results(tmp_path / "fresh")
    record = read_run(tmp_path / "run")
    assert record is not None and len(record.starts) == 1


def test_a_moved_run_is_continued_from_its_folder_alone(tmp_path: Path) -> None:
    Interruption.error = STOP
    with pytest.raises(StoppedBySignal):
        run(chain(tmp_path / "run"), "new")
    (tmp_path / "run").rename(tmp_path / "moved")
    found = load_resumable(tmp_path / "moved", ["stages.export.shard_gib=2"])
    assert found.working_folder == Path.cwd()
    result = run(found.spec)
    assert actions(result) == {"sft": "resume", "rl": "run", "evaluate": "run", "export": "run"}
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run_cannot_be_continued(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(OutputFolderError, match="holds no started run"):
            load_resumable(folder)


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL loses nothing that the kernel has; waiting for the disk would only make hundreds of runs slow."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def _in_child(spec: ExperimentSpec, kill_at: int | None) -> bool:
    """Run `spec` in a forked process that dies by SIGKILL just before its `kill_at`-th file operation; true if it ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if kill_at is not None:
                _die_at(kill_at)
            run(spec)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def _die_at(count: int) -> None:
    """Count this process's file operations from now on, and die before the one numbered `count`."""
    left = count

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal left
        if event in WATCHED:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_killed_at_every_file_operation_and_started_again_is_never_killed(tmp_path: Path, no_fsync: None) -> None:
    run(chain(tmp_path / "whole"), "new")
    expected = results(tmp_path / "whole")
    kills = 0
    while not _in_child(chain(tmp_path / f"k{kills}"), kills + 1):
        spec = chain(tmp_path / f"k{kills}")
        assert _in_child(spec, None)
        assert results(tmp_path / f"k{kills}") == expected, f"killed before file operation {kills + 1}"
        shutil.rmtree(tmp_path / f"k{kills}")
        kills += 1
    assert kills > 50


def test_a_stage_that_was_killed_after_it_saved_is_resumed_and_not_started_over(tmp_path: Path, no_fsync: None) -> None:
    saved, kill_at = False, 0
    while not saved:
        kill_at += 1
        folder = tmp_path / f"k{kill_at}"
        assert not _in_child(chain(folder), kill_at)
        saved = (folder / "sft/state.json").exists()
    assert read_status(folder).stages["sft"].state == "running"
    result = run(chain(folder))
    assert actions(result) == {"sft": "resume", "rl": "run", "evaluate": "run", "export": "run"}
    assert "killed" in result.stages[0].reason


def test_killed_again_and_again_while_the_spec_changes_is_never_killed(tmp_path: Path, no_fsync: None) -> None:
    run(chain(tmp_path / "whole", seed=2), "new")
    expected = results(tmp_path / "whole")
    for trial in range(10):
        random_numbers = random.Random(trial)
        folder = tmp_path / f"t{trial}"
        run(chain(folder, seed=1), "new")
        for _ in range(4):
            _in_child(chain(folder, seed=2), random_numbers.randint(1, 60))
        assert _in_child(chain(folder, seed=2), None)
        assert results(folder) == expected, f"trial {trial}"
