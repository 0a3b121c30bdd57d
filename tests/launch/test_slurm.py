"""Jobs on a real Slurm of four hosts: submitted, refused, stopped in the middle, started again, cancelled."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.launch.node.hostlist import expand
from nemo_rl_like.spec.loader import load_spec
from tests.launch.jobs import nrl, steps_done, wait_until, write_job
from tests.launch.slurm_cluster import ADDRESSES, Cluster, running
from tests.launch.slurm_stub import Stub, start_now
from tests.stages.killing import finish, outcome
from tests.stages.test_killed_vllm import STEPS, Run
from tests.tiny_folders import save_llama

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
        (
            ("launch.slurm.partition=nowhere",),
            r"(?s)invalid partition.*fix: look at `launch.slurm.partition` \(nowhere\)",
        ),
        (
            ("launch.accelerator=gpu", "launch.devices_per_node=8", "launch.slurm.gres_type=a100"),
            "(?s)(Invalid generic resource|not available).*fix: look at .*`launch.devices_per_node` \\(8\\)",
        ),
        (("engine.kind=vllm", "launch.generation.partition=nowhere"), "invalid partition"),
    ],
)
def test_what_slurm_itself_refuses_is_shown_in_its_words(
    slurm: Cluster, tmp_path: Path, changes: tuple[str, ...], words: str
) -> None:
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES)
    done = nrl("submit", str(spec), *changes, "--to", "slurm", "--dry-run", environ=slurm.environ)
    assert done.returncode == 1 and re.search(words, done.stderr), done.stderr
    assert not (tmp_path / "run.jobs").exists()


def test_hosts_that_generate_are_accepted_as_a_group_of_their_own(slurm: Cluster, tmp_path: Path) -> None:
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES, nodes=2, engine="vllm")
    changes = ("launch.accelerator=gpu", "launch.devices_per_node=8", "launch.slurm.partition=late")
    generation = "launch.generation={nodes: 2, devices_per_node: 4, partition: early}"
    done = nrl("submit", str(spec), *changes, generation, "--to", "slurm", "--dry-run", environ=slurm.environ)
    assert done.returncode == 0 and "#SBATCH hetjob" in done.stdout, done.stderr
    generation = generation.replace("nodes: 2", "nodes: 3")
    done = nrl("submit", str(spec), *changes, generation, "--to", "slurm", "--dry-run", environ=slurm.environ)
    assert done.returncode == 1 and "not available" in done.stderr, "three hosts of two"


def test_a_job_that_slurm_accepts_is_shown_and_not_started(slurm: Cluster, tmp_path: Path) -> None:
    spec = write_job(tmp_path, tmp_path / "run", addresses=ADDRESSES)
    changes = ("launch.accelerator=gpu", "launch.devices_per_node=8", "launch.slurm.gres_type=h100")
    done = nrl("submit", str(spec), *changes, "--to", "slurm", "--dry-run", environ=slurm.environ)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gres=gpu:h100:8" in done.stdout and "sbatch --parsable" in done.stdout
    assert not (tmp_path / "run.jobs").exists() and slurm.call("squeue", "-h") == ""


def test_a_container_and_an_allow_list_reach_every_host(stub: Stub) -> None:
    """What srun's own parser made of the flags, in each task."""
    stub.does("tell")
    stub.environ |= {"SECRET_WORD": "hidden", "MY_WORD": "told"}
    spec = stub.spec("  mounts: [{source: '/a b', target: /data, read_only: true}]\n", nodes=2)
    spec.write_text(spec.read_text() + "secrets: {MINE: {env: MY_WORD}}\n")
    done = stub.submit(spec, "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    mounts = f"/a b:/data:ro,{stub.folder}:{stub.folder},{stub.jobs}:{stub.jobs}"
    given = f"some/image@sha256:aa | {mounts} | {stub.folder} | yes | {stub.folder} | told"
    words = f"node {stub.jobs}/0001/spec.yaml --stop-file {stub.jobs}/0001/stop"
    assert sorted(stub.heard()) == [f"0.0: {words}", f"1.0: {words}", given, given]


def test_a_saved_job_is_started_again_without_end_and_a_failed_one_as_often_as_asked(stub: Stub) -> None:
    stub.does("save")
    job = stub.started(stub.spec("  retries: 1\n"))
    wait_until(lambda: len(stub.heard()) == 1, lambda: str(stub.heard()))
    stub.slurm.call("scancel", "--batch", "--signal=USR1", job)
    stub.restart(job, "3")
    assert not (stub.jobs / "0001" / "failures").exists(), "it saved, which is no failure"
    wait_until(lambda: stub.slurm.job(job)["Restarts"] == "2", lambda: str(stub.slurm.job(job)))
    stub.restart(job, "4")
    ended = stub.slurm.wait(job, "FAILED", "COMPLETED")
    assert ended["ExitCode"] == "4:0" and [line.split(":")[0] for line in stub.heard()] == ["0.0", "0.1", "0.2"]


@pytest.mark.slow
def test_a_wrong_spec_is_not_started_again(stub: Stub) -> None:
    stub.does("2")
    done = stub.submit(stub.spec(), "--wait")
    assert done.returncode == 2 and "failed (FAILED, NonZeroExitCode, exit code 2:0)" in done.stdout
    assert len(stub.heard()) == 1


@pytest.mark.slow
def test_a_running_job_that_is_cancelled_saves_and_stays_ended(stub: Stub) -> None:
    stub.does("save")
    job = stub.started(stub.spec())
    wait_until(lambda: len(stub.heard()) == 1, lambda: str(stub.heard()))
    assert nrl("cancel", str(stub.output), environ=stub.environ).returncode == 0
    ended = stub.slurm.wait(job, "FAILED", "COMPLETED", "CANCELLED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("75:0", "0")
    assert (
        "cancelled (FAILED, NonZeroExitCode, exit code 75:0)"
        in nrl("status", str(stub.output), environ=stub.environ).stdout
    )


@pytest.mark.slow
def test_an_array_runs_each_seed_in_its_own_folder(stub: Stub) -> None:
    stub.does("0")
    done = stub.submit(stub.spec(), "--seeds", "3,8", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    for seed in (3, 8):
        told = f"node {stub.jobs}/0001/seed-{seed}.yaml --stop-file {stub.jobs}/0001/stop-{seed}"
        assert stub.heard(f"log-{seed}.txt") == [f"0.0: {told}"]
        spec = load_spec(stub.jobs / "0001" / f"seed-{seed}.yaml")
        assert (spec.seed, spec.output) == (seed, f"{stub.output}-seed{seed}")


@pytest.mark.slow
def test_one_seed_of_an_array_is_told_of_and_cancelled_alone(stub: Stub) -> None:
    stub.does("save")
    job = stub.started(stub.spec(), "--seeds", "3,8")
    wait_until(lambda: all(stub.heard(f"log-{seed}.txt") for seed in (3, 8)), lambda: stub.slurm.call("squeue"))
    one, other = (f"{stub.output}-seed{seed}" for seed in (3, 8))
    assert nrl("cancel", one, environ=stub.environ).returncode == 0
    wait_until(lambda: "cancelled (seed 3: FAILED" in status_of(stub, one), lambda: status_of(stub, one))
    assert f"slurm job {job}_8: running (seed 8: RUNNING, on node" in status_of(stub, other)
    assert f"slurm job {job}: running (seed " in status_of(stub, str(stub.output))
    logged = nrl("logs", one, environ=stub.environ).stdout
    assert f"seed-3.yaml --stop-file {stub.jobs}/0001/stop-3" in logged and "seed-8" not in logged
    assert nrl("cancel", str(stub.output), environ=stub.environ).returncode == 0
    wait_until(lambda: stub.slurm.call("squeue", "-h") == "", lambda: stub.slurm.call("squeue"))
    assert f"slurm job {job}: cancelled (seed " in status_of(stub, str(stub.output))


def status_of(stub: Stub, run: str) -> str:
    return nrl("status", run, environ=stub.environ).stdout


@pytest.mark.slow
def test_an_array_that_is_cancelled_leaves_no_task_waiting(stub: Stub) -> None:
    """One host is up, so that two of four tasks of two cores run."""
    stub.does("save")
    stub.slurm.call("scontrol", "update", "nodename=node[2-4]", "state=drain", "reason=test")
    try:
        stub.started(stub.spec("  cpus_per_node: 2\n"), "--seeds", "1,2,3,4")
        wait_until(lambda: len(stub.slurm.call("squeue", "-h", "-t", "R").splitlines()) == 2, lambda: "none runs")
        wait_until(lambda: len(list(stub.jobs.glob("0001/log-*.txt"))) == 2, lambda: "no logs")
        wait_until(lambda: all(stub.heard(p.name) for p in stub.jobs.glob("0001/log-*.txt")), lambda: "not heard")
        assert nrl("cancel", str(stub.output), environ=stub.environ).returncode == 0
        wait_until(lambda: stub.slurm.call("squeue", "-h") == "", lambda: stub.slurm.call("squeue"))
        assert len(list(stub.jobs.glob("0001/log-*.txt"))) == 2
    finally:
        stub.slurm.call("scontrol", "update", "nodename=node[2-4]", "state=resume")


@pytest.mark.slow
def test_stages_are_jobs_and_after_one_that_failed_the_next_never_starts(stub: Stub) -> None:
    stub.does("0")
    spec = stub.spec()
    spec.write_text(spec.read_text() + "  - {kind: evaluate}\n")
    done = stub.submit(spec, "--stages-as-jobs", "--wait")
    assert done.returncode == 0 and done.stdout.count(": done (COMPLETED") == 2, done.stdout + done.stderr
    assert [log_of(stub.output, i).split("--until ")[1].strip() for i in (1, 2)] == ["rl", "evaluate"]
    stub.does("2")
    broken = stub.submit(spec, "--stages-as-jobs", "--wait")
    assert broken.returncode == 2 and f"{stub.jobs}/0004: cancelled (CANCELLED" in broken.stdout, (
        broken.stdout + broken.stderr
    )
    assert not (stub.jobs / "0004" / "log.txt").exists()


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


def test_without_accounting_a_forgotten_job_says_what_is_not_known(stub: Stub) -> None:
    stub.does("0")
    assert stub.submit(stub.spec(), "--wait").returncode == 0
    stub.slurm.forget_jobs()
    told = nrl("status", str(stub.output), environ=stub.environ)
    assert re.search(
        r"unknown \(slurmctld has forgotten the job \(MinJobAge\), and there is no accounting: .*how it ended is not known",
        told.stdout,
    ), told.stdout
    assert "0.0: node" in nrl("logs", str(stub.output), "-f", environ=stub.environ).stdout


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
def test_a_job_whose_wall_time_ends_before_its_start_up_gives_up(slurm: Cluster, tmp_path: Path) -> None:
    """One minute, of which 59 s are to save: Slurm itself says USR1 at once, each time; the second stop is the last."""
    output = tmp_path / "run"
    short = "  stops_without_progress: 2\n  time_limit_min: 1\n  save_before_end_s: 59\n"
    job = submit(slurm, write_job(tmp_path, output, addresses=ADDRESSES, extra=short))
    wait_until(lambda: slurm.job(job)["Restarts"] == "1", lambda: log_of(output))
    start_now(slurm, job)
    ended = slurm.ended(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "1"), log_of(output)
    assert "told to stop 2 times in a row (`launch.stops_without_progress`) before anything new" in log_of(output)


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
@pytest.mark.timeout(1200)
def test_vllm_on_hosts_of_its_own_equals_a_run_on_one_host(slurm: Cluster, tmp_path: Path) -> None:
    """A heterogeneous job whose training hosts stand behind the generating one by name. The replica's host fetches every version of the weights."""
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained(save_llama(tmp_path / "model", len(tokenizer), positions=32, head_dim=32))
    model = f"model={{path: {tmp_path / 'model'}}}"
    generation = "  generation: {nodes: 1, partition: early}\n  slurm: {partition: late}\n  memory_gib_per_node: 4\n"
    output, alone = tmp_path / "run", tmp_path / "alone"
    spec = write_job(tmp_path, output, addresses=ADDRESSES, extra=generation, engine="vllm")
    job = submit(slurm, spec, model)
    slurm.ended(job, seconds=900)
    told = nrl("status", str(output), environ=slurm.environ).stdout
    assert ": done (COMPLETED, exit code 0:0)" in told, told + log_of(output)
    hosts = {path.name.split("-")[0] for path in (tmp_path / "run.jobs" / "nodes").iterdir()}
    assert {"node3", "node4"} < hosts <= {"node3", "node4", "node1", "node2"} and len(hosts) == 3
    (engine,) = output.glob("**/engine-*.log")
    assert engine.read_text().count("fetched version") == STEPS + 1, "at the start and after each step"
    reference = write_job(tmp_path, alone, addresses={}, engine="vllm")
    assert finish(["run", str(reference), model, "cluster.devices=2"], tmp_path / "alone.log", 500) == 0
    far, near = Run.of(output), Run.of(alone)
    assert far.samples == near.samples
    torch.testing.assert_close(far.log_probs(near.episodes), near.log_probs(near.episodes), atol=1e-5, rtol=0)


def kill_host(name: str) -> None:
    """SIGKILL to `nrl node` on a Slurm host; its watchdog ends the rest."""
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("SLURMD_NODENAME") == name and "node" in process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if mine:
            process.kill()
