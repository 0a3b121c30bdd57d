"""Laws of local jobs: detached, their state in their folder alone, ended by a signal that saves; and of submissions as such."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import OutputFolderError, SpecError, SubmitError
from nemo_rl_like.cli.commands.job import request_of
from nemo_rl_like.launch import registry, submission
from nemo_rl_like.launch.local import LocalTarget
from nemo_rl_like.launch.submit import Request, _job, dry_run, resubmit, status, submit
from nemo_rl_like.launch.target import Job, Rendered
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec, resolved_yaml
from tests.launch.jobs import nrl, wait_until

LAUNCH = {"accelerator": "cpu", "devices_per_node": 1}
STUBBORN = """
import pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
print("working", flush=True)
while not asked:
    time.sleep(0.05)
print("saved", flush=True)
pathlib.Path(sys.argv[1]).write_text("75")
"""


def request(tmp_path: Path, target: str = "local", launch: dict[str, Any] | None = None, **top: Any) -> Request:
    values = {
        "output": "run",
        "model": {"path": "nowhere"},
        "environment": {"name": "arithmetic"},
        "stages": [{"kind": "evaluate"}],
        "launch": LAUNCH if launch is None else launch,
    }
    return Request(ExperimentSpec.model_validate(values | top), target, tmp_path)


def test_a_job_outlives_its_submitter_and_ends_when_it_has_saved(tmp_path: Path) -> None:
    job = _job(request(tmp_path), tmp_path)
    target = LocalTarget()
    before = signal.getsignal(signal.SIGTERM)
    job_id = target.submit(job, Rendered({}, (sys.executable, "-c", STUBBORN, str(tmp_path / "exit_code"))))
    wait_until(lambda: "working" in (tmp_path / "log.txt").read_text(), lambda: "it did not start")
    pid = int(job_id.partition(".")[0])
    assert os.getsid(pid) == pid, "a session of its own: a terminal's end does not reach it"
    assert target.status(job_id, tmp_path).state == "running"
    target.cancel(job_id, tmp_path)
    assert list(target.logs(job_id, tmp_path, follow=True)) == ["working", "saved"]
    ended = target.status(job_id, tmp_path)
    assert (ended.state, ended.exit_code) == ("cancelled", 75)
    target.cancel(job_id, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_that_was_killed_or_whose_number_another_process_has_is_not_running(tmp_path: Path) -> None:
    target = LocalTarget()
    assert target.status(f"{os.getpid()}.1", tmp_path).state == "failed"
    assert target.status("4194304.1", tmp_path).detail == "the process was killed without a word"


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({**LAUNCH, "nodes": 2}, "`launch.nodes` is 2"),
        ({**LAUNCH, "image": "x"}, "`launch.image` is 'x'"),
        ({**LAUNCH, "mounts": [{"source": "/a", "target": "/a"}]}, "`launch.mounts`"),
        ({**LAUNCH, "time_limit_min": 10}, "`launch.time_limit_min` is 10"),
        ({**LAUNCH, "memory_gib_per_node": 4}, "`launch.memory_gib_per_node` is 4"),
        ({**LAUNCH, "retries": 5}, "`launch.retries` is 5, and the local target starts a job once"),
    ],
)
def test_what_a_local_job_cannot_honour_is_named_and_leaves_nothing(
    tmp_path: Path, launch: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        submit(request(tmp_path, launch=launch))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ({"policy": {"layout": {"dp": 2}}}, "2 ranks, and the job has 1 devices"),
        (
            {"stages": [{"kind": "evaluate", "settings": {"policy": {"layout": {"tp": 4}}}}]},
            "`stages.evaluate.settings.policy.layout` asks for 4 ranks, and the job has 1 devices",
        ),
        (
            {"engine": {"kind": "vllm", "tensor_parallel": 2}, "launch": {**LAUNCH, "accelerator": "gpu", "nodes": 2}},
            "`engine.tensor_parallel` is 2, and a host has 1 devices",
        ),
        ({"cluster": {"address": "a:1"}}, "`cluster.address` is a:1"),
        (
            {"launch": {**LAUNCH, "generation": {}}},
            "`launch.generation` is given, and target local has hosts of one kind",
        ),
        ({"launch": {**LAUNCH, "generation": {}}}, "`engine.kind` is embedded, which samples on the hosts that train"),
        (
            {
                "engine": {"kind": "vllm", "replicas": 3, "tensor_parallel": 2},
                "launch": {**LAUNCH, "accelerator": "gpu", "generation": {"devices_per_node": 4}},
            },
            "`engine` asks for 6 devices .*, and the hosts that generate have 4",
        ),
    ],
)
def test_what_no_target_can_honour_is_named(tmp_path: Path, top: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        dry_run(request(tmp_path, **top))


@pytest.mark.parametrize("start", [submit, dry_run])
def test_a_host_without_the_gpus_is_told_before_anything_starts(
    tmp_path: Path, start: Callable[[Request], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl_like.launch.node.devices.visible_gpus", lambda: 3)
    words = r"`launch\.devices_per_node` is 4, but this host shows 3 GPUs .*`launch.accelerator: cpu` for none"
    with pytest.raises(SubmitError, match=words):
        start(request(tmp_path, launch={"devices_per_node": 4}))
    assert not list(tmp_path.rglob("*.yaml"))
    dry_run(request(tmp_path, launch={"devices_per_node": 3}))


def test_a_dry_run_shows_the_resolved_spec_and_leaves_nothing(tmp_path: Path) -> None:
    ((job, rendered),) = dry_run(request(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "spec.yaml").write_text(rendered.files["spec.yaml"])
    assert load_spec(tmp_path / "spec.yaml") == job.spec and job.spec.output == str(tmp_path / "run")


def test_seeds_become_runs_of_their_own(tmp_path: Path) -> None:
    made = dry_run(Request(request(tmp_path).spec, "local", tmp_path, (1, 5)))
    assert [(job.spec.seed, job.spec.output) for job, _ in made] == [
        (s, str(tmp_path / f"run-seed{s}")) for s in (1, 5)
    ]


@pytest.mark.parametrize(
    ("target", "seeds", "chained", "words"),
    [
        ("local", (), True, "--stages-as-jobs: target local"),
        ("slurm", (1, 1), False, "--seeds names one twice: 1,1"),
        ("slurm", (1, 2), True, "exclude each other"),
    ],
)
def test_what_a_target_cannot_split_is_refused(
    tmp_path: Path, target: str, seeds: tuple[int, ...], chained: bool, words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        dry_run(Request(request(tmp_path).spec, target, tmp_path, seeds, chained))


def test_a_target_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(
        SpecError, match="no target 'pbs'; the targets are local, slurm, kubernetes, container, nemo-run-local"
    ):
        registry.target("pbs")
    with pytest.raises(SpecError, match="no target 'slrum'; did you mean `slurm`"):
        registry.entry("slrum")


def test_a_way_to_a_target_is_a_target_of_its_own(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(resolved_yaml(request(tmp_path).spec))
    ask = partial(request_of, spec, [], seeds="1,2", stages_as_jobs=False, until=None)
    assert (ask("local", via="nemo-run").target, ask("slurm", via=None).target) == ("nemo-run-local", "slurm")
    assert ask("local", via=None).seeds == (1, 2)
    with pytest.raises(SpecError, match="--via nemo-run reaches local and slurm, and --to is 'kubernetes'; leave"):
        ask("kubernetes", via="nemo-run")
    with pytest.raises(SpecError, match="--via is 'nemorun', must be nemo-run"):
        ask("slurm", via="nemorun")


@pytest.mark.parametrize("seeds", ["-1", "1,-2", "1,", "1;2", "1.5", ""])
def test_seeds_that_no_spec_takes_are_refused(tmp_path: Path, seeds: str) -> None:
    with pytest.raises(SpecError, match=f"--seeds is '{seeds}', must be whole numbers of 0 or more"):
        request_of(tmp_path / "any", [], "local", via=None, seeds=seeds, stages_as_jobs=False, until=None)


@pytest.mark.parametrize("start", [submit, dry_run])
@pytest.mark.parametrize("target", ["local", "slurm", "kubernetes", "container"])
def test_a_stage_that_is_none_is_refused_before_anything_is_submitted(
    tmp_path: Path, target: str, start: Callable[[Request], object]
) -> None:
    with pytest.raises(SpecError, match="--until is 'evaluat', and the stages are evaluate; did you mean `evaluate`"):
        start(replace(request(tmp_path, target), until="evaluat"))
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_was_never_submitted_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(OutputFolderError, match=r"run has no submission.*run\.jobs"):
        status(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(OutputFolderError, match=r"started by `nrl run` .* `nrl pipeline status .*/run` .* `nrl resume"):
        status(tmp_path / "run")


class Refusing(LocalTarget):
    """Takes a job, or does not."""

    def __init__(self, taken: list[str], refuses: bool) -> None:
        self.taken, self.refuses = taken, refuses

    def submit(self, job: Job, rendered: Rendered) -> str:
        if self.refuses:
            raise SubmitError("no")
        self.taken.append("1.1")
        return "1.1"

    def cancel(self, job_id: str, folder: Path) -> None:
        self.taken.remove(job_id)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_submission_that_breaks_off_leaves_neither_folder_nor_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    taken: list[str] = []

    def full(folder: Path, record: submission.Record) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(registry, "target", lambda name: Refusing(taken, refuses))
    monkeypatch.setattr(submission, "write_record", full)
    with pytest.raises(SubmitError if refuses else OSError):
        submit(request(tmp_path))
    assert taken == [] and [path.name for path in (tmp_path / "run.jobs").iterdir()] == [".lock"]


@pytest.mark.service
def test_a_job_that_fails_tells_why_and_may_be_submitted_again(tmp_path: Path) -> None:
    """The real `nrl node` and driver; the model's folder is not there, which the driver finds before Ray starts."""
    (made,) = submit(request(tmp_path))
    with pytest.raises(SubmitError, match="has a submission that is running"):
        submit(request(tmp_path))
    assert [path.name for path in (tmp_path / "run.jobs").iterdir() if path.name.isdecimal()] == ["0001"]
    log = "\n".join(LocalTarget().logs(made.record.job_id, made.folder, follow=True))
    assert f"which is not a folder (looked in {tmp_path})" in log
    told = nrl("status", str(tmp_path / "run"))
    assert "failed (exit code 2)" in told.stdout, told.stdout + told.stderr
    (again,) = resubmit(made.folder)
    assert again.folder == tmp_path / "run.jobs" / "0002"
    assert load_spec(again.folder / "spec.yaml") == load_spec(made.folder / "spec.yaml")
    assert submission.find(tmp_path / "run") == again
    wait_until(lambda: status(again.folder)[1].state == "failed", lambda: str(status(again.folder)))
