"""Jobs on a real Slurm of four hosts: submitted, refused, stopped in the middle, started again, cancelled."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl_like.launch.node.hostlist import expand
from nemo_rl_like.launch.slurm.target import SlurmTarget
from tests.launch.jobs import nrl, steps_done, wait_until, write_job
from tests.launch.slurm_cluster import ADDRESSES, Cluster, running
from tests.stages.killing import finish, outcome

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def log_of(output: Path, number: int = 1, characters: int = 4000) -> str:
    path = Path(f"{output}.jobs") / f"{number:04d}" / "log.txt"
    return path.read_text()[-characters:] if path.is_file() else "no log"


def submit(slurm: Cluster, spec: Path, *further: str) -> str:
    """Submit; the job's id."""
    done = nrl("submit", str(spec), "--to", "slurm", *further, environ=slurm.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("slurm job ")[1].split()[0]


def never_stopped(folder: Path, steps: int) -> Path:
    """The output of the same run on this host alone, from start to end."""
    output = folder / "alone"
    spec = write_job(folder, output, steps=steps, addresses={})
    assert finish(["run", str(spec), "cluster.devices=2"], folder / "alone.log") == 0, (
        folder / "alone.log"
    ).read_text()[-2000:]
    return output


def test_host_lists_are_written_out_as_slurm_does(slurm: Cluster) -> None:
    for text in ("node[1-4]", "a[08-11,3],c", "x[0-1]y[2-3]", "plain"):
        assert expand(text) == slurm.call("scontrol", "show", "hostnames", text).split()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("launch.slurm.partition=nowhere",), "invalid partition"),
        (
            ("launch.accelerator=gpu", "launch.devices_per_node=8", "launch.slurm.gres_type=a100"),
            "Invalid generic resource|not available",
        ),
    ],
)
def test_what_slurm_itself_refuses_is_shown_in_its_words(
    slurm: Cluster, tmp_path: Path, changes: tuple[str, ...], words: str
) -> None:
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES)
    done = nrl("submit", str(spec), *changes, "--to", "slurm", "--dry-run", environ=slurm.environ)
    assert done.returncode == 1 and re.search(words, done.stderr), done.stderr
    assert not (tmp_path / "run.jobs").exists()


def test_a_job_that_slurm_accepts_is_shown_and_not_started(slurm: Cluster, tmp_path: Path) -> None:
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES)
    changes = ("launch.accelerator=gpu", "launch.devices_per_node=8", "launch.slurm.gres_type=h100")
    done = nrl("submit", str(spec), *changes, "--to", "slurm", "--dry-run", environ=slurm.environ)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gres=gpu:h100:8" in done.stdout and "sbatch --parsable" in done.stdout
    assert not (tmp_path / "run.jobs").exists() and slurm.call("squeue", "-h") == ""


STUB = """#!/bin/sh
echo "$SLURM_PROCID: $* | $GIVEN_IMAGE | $GIVEN_MOUNTS | $GIVEN_WORKDIR | $GIVEN_NO_HOME | $PWD | $SECRET_WORD$MY_WORD"
"""


def test_a_container_and_an_allow_list_reach_every_host(slurm: Cluster, tmp_path: Path) -> None:
    """What srun's own parser made of the flags, in each task; `nrl` of the image is a stub that tells."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nrl").write_text(STUB)
    (tmp_path / "bin" / "nrl").chmod(0o755)
    environ = slurm.environ | {
        "PATH": f"{tmp_path}/bin:{slurm.environ['PATH']}",
        "SECRET_WORD": "hidden",
        "MY_WORD": "told",
    }
    extra = "  image: nvcr.io/nvidia/nemo@sha256:aa\n  mounts: [{source: '/a b', target: /data, read_only: true}]\n"
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES, extra=extra)
    spec.write_text(spec.read_text() + "secrets: {MINE: {env: MY_WORD}}\n")
    done = nrl("submit", str(spec), "--to", "slurm", "--wait", environ=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = f"{tmp_path}/run.jobs"
    mounts = f"/a b:/data:ro,{tmp_path}:{tmp_path},{jobs}:{jobs}"
    told = f"node {jobs}/0001/spec.yaml --stop-file {jobs}/0001/stop"
    given = f"{told} | nvcr.io/nvidia/nemo@sha256:aa | {mounts} | {tmp_path} | yes | {tmp_path} | told"
    assert sorted(log_of(tmp_path / "run").splitlines()) == [f"{rank}: {given}" for rank in (0, 1)]


def test_a_waiting_job_is_refused_a_second_time_and_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES, nodes=2)
    slurm.call("scontrol", "update", "partition=batch", "state=down")
    try:
        job = submit(slurm, spec)
        again = nrl("submit", str(spec), "--to", "slurm", environ=slurm.environ)
        assert again.returncode == 1 and f"is queued ({tmp_path}/run.jobs/0001, slurm job {job})" in again.stderr
        assert nrl("cancel", str(tmp_path / "run"), environ=slurm.environ).returncode == 0
        told = nrl("status", str(tmp_path / "run"), environ=slurm.environ)
        assert f"slurm job {job}: cancelled" in told.stdout, told.stdout + told.stderr
    finally:
        slurm.call("scontrol", "update", "partition=batch", "state=up")


def test_a_job_of_two_hosts_equals_a_run_on_one(slurm: Cluster, tmp_path: Path) -> None:
    """GRPO with a data-parallel rank on each host: the same weights, moments, episodes and metrics to the last bit."""
    output = tmp_path / "run"
    done = nrl(
        "submit",
        str(write_job(tmp_path, output, steps=2, addresses=ADDRESSES)),
        "--to",
        "slurm",
        "--wait",
        environ=slurm.environ,
    )
    assert done.returncode == 0, done.stdout + log_of(output)
    assert {"node1", "node2"} == {path.name.split("-")[0] for path in (tmp_path / "run.jobs" / "nodes").iterdir()}
    assert outcome(output) == outcome(never_stopped(tmp_path, 2))


@pytest.mark.slow
def test_two_hosts_told_to_save_in_the_middle_equal_one_that_never_stopped(slurm: Cluster, tmp_path: Path) -> None:
    """The batch script hears USR1, the driver saves, Slurm starts the job again, and it goes on by itself."""
    output = tmp_path / "run"
    job = submit(slurm, write_job(tmp_path, output, steps=6, addresses=ADDRESSES))
    wait_until(lambda: steps_done(output) >= 2, lambda: log_of(output))
    token = output.with_name("run.jobs") / "0001" / "token"
    assert token.stat().st_mode & 0o777 == 0o600 and token.read_text() not in log_of(output)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: slurm.job(job).get("Restarts") == "1", lambda: log_of(output))
    done_before = steps_done(output)
    assert 2 <= done_before < 6, "it must be stopped in the middle, or this test shows nothing"
    start_now(slurm, job)
    ended = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    assert ended["JobState"] == "COMPLETED", log_of(output)
    assert outcome(output) == outcome(never_stopped(tmp_path, 6))
    told = nrl("status", str(output), environ=slurm.environ).stdout
    assert "done (COMPLETED, exit code 0:0)" in told and "rl: done" in told
    assert "resume" in "".join(nrl("logs", str(output), environ=slurm.environ).stdout)
    assert subprocess.run(["pgrep", "-f", str(token.parent)], capture_output=True).returncode == 1, "nothing is left"


@pytest.mark.slow
def test_a_job_whose_spec_is_wrong_is_not_started_again(slurm: Cluster, tmp_path: Path) -> None:
    spec = write_job(tmp_path, tmp_path / "run", nodes=1, ranks=1, addresses={})
    (tmp_path / "prompts.jsonl").unlink()
    done = nrl("submit", str(spec), "--to", "slurm", "--wait", environ=slurm.environ)
    assert done.returncode == 2 and "failed (FAILED, NonZeroExitCode, exit code 2:0)" in done.stdout, (
        done.stdout + log_of(tmp_path / "run")
    )
    assert not (tmp_path / "run.jobs" / "0001" / "failures").exists()


@pytest.mark.slow
def test_a_host_whose_part_dies_is_named_and_the_job_goes_on_by_itself(slurm: Cluster, tmp_path: Path) -> None:
    """SIGKILL on rank 1's host: rank 0 says who is gone, the job fails, is requeued, and equals a run that never failed."""
    output = tmp_path / "run"
    job = submit(slurm, write_job(tmp_path, output, steps=6, addresses=ADDRESSES))
    wait_until(lambda: steps_done(output) >= 3, lambda: log_of(output))
    kill_host("node2")
    wait_until(lambda: slurm.job(job).get("Restarts") == "1", lambda: log_of(output))
    assert "rank 1 (node2) was lost" in log_of(output, characters=20000)
    assert steps_done(output) < 6, "it must fail in the middle, or this test shows nothing"
    start_now(slurm, job)
    assert slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")["JobState"] == "COMPLETED", log_of(output)
    assert (tmp_path / "run.jobs" / "0001" / "failures").read_text() == "x"
    assert outcome(output) == outcome(never_stopped(tmp_path, 6))


@pytest.mark.slow
def test_a_running_job_that_is_cancelled_saves_and_stays_ended_until_it_is_submitted_again(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
    output = tmp_path / "run"
    spec = write_job(tmp_path, output, nodes=1, ranks=1, steps=60, addresses={})
    job = submit(slurm, spec)
    wait_until(lambda: steps_done(output) >= 2, lambda: log_of(output))
    SlurmTarget().cancel(job, tmp_path / "run.jobs" / "0001")
    slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    told = nrl("status", str(output), environ=slurm.environ).stdout
    assert "cancelled" in told and "exit code 75:0" in told and "rl: stopped" in told, told
    assert slurm.job(job)["Restarts"] == "0"
    again = nrl("resubmit", str(output), "--wait", environ=slurm.environ)
    assert again.returncode == 0 and "run.jobs/0002: done" in again.stdout, again.stdout + again.stderr
    assert steps_done(output) == 60


@pytest.mark.slow
def test_an_array_runs_each_seed_in_its_own_folder(slurm: Cluster, tmp_path: Path) -> None:
    spec = write_job(tmp_path, tmp_path / "run", nodes=1, ranks=1, steps=2, addresses={})
    done = nrl("submit", str(spec), "--to", "slurm", "--seeds", "3,8", "--wait", environ=slurm.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {seed: outcome(tmp_path / f"run-seed{seed}") for seed in (3, 8)}
    assert found[3].weights != found[8].weights, "another seed, another run"
    alone = write_job(tmp_path, tmp_path / "alone", nodes=1, ranks=1, steps=2, addresses={})
    assert finish(["run", str(alone), "seed=8"], tmp_path / "alone.log") == 0
    assert found[8] == outcome(tmp_path / "alone")


@pytest.mark.slow
def test_stages_are_jobs_that_wait_for_each_other(slurm: Cluster, tmp_path: Path) -> None:
    """The second job finds the first stage done; a chain whose first job fails never starts its second."""
    spec = write_job(tmp_path, tmp_path / "run", nodes=1, ranks=1, steps=2, addresses={})
    spec.write_text(spec.read_text() + "  - {kind: evaluate}\n")
    done = nrl("submit", str(spec), "--to", "slurm", "--stages-as-jobs", "--wait", environ=slurm.environ)
    assert done.returncode == 0, done.stdout + done.stderr + log_of(tmp_path / "run", 2)
    assert done.stdout.count(": done (COMPLETED") == 2
    first, second = log_of(tmp_path / "run", 1), log_of(tmp_path / "run", 2)
    assert "stage rl: run" in first and "stage evaluate" not in first
    assert "stage rl: skip" in second and "stage evaluate: run" in second
    (tmp_path / "prompts.jsonl").unlink()
    broken = nrl(
        "submit",
        str(spec),
        "output=" + str(tmp_path / "other"),
        "--to",
        "slurm",
        "--stages-as-jobs",
        "--wait",
        environ=slurm.environ,
    )
    assert broken.returncode == 2, broken.stdout + broken.stderr
    assert "other.jobs/0002: cancelled (CANCELLED" in broken.stdout


def start_now(slurm: Cluster, job: str) -> None:
    """Start a requeued job without the two minutes that Slurm gives its hosts to clean up, once they have."""
    wait_until(lambda: slurm.job(job)["JobState"] == "PENDING", lambda: str(slurm.job(job)))
    wait_until(lambda: slurm.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "4", lambda: slurm.call("sinfo"))
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")


def kill_host(name: str) -> None:
    """SIGKILL to `nrl node` on a Slurm host; its watchdog ends the rest."""
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("SLURMD_NODENAME") == name and "node" in process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if mine:
            process.kill()
