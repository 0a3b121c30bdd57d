"""What is rendered for two pods, run: each pod's command, user, read-only root and volumes on a host of its own, equal to one host's run."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from nemo_rl_like.launch.kubernetes.manifests import token_object
from nemo_rl_like.launch.kubernetes.target import FILE, KubernetesTarget
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.loader import load_spec
from tests.launch.hosts import Host, connected
from tests.launch.jobs import steps_done, wait_until, write_job
from tests.launch.kubernetes.pods import Pod, of_kind
from tests.stages.killing import finish, outcome

pytestmark = pytest.mark.service

KUBERNETES = """
  image: registry.example/nrl@sha256:0000000000000000000000000000000000000000000000000000000000000000
  environment: {OMP_NUM_THREADS: "1", HF_HUB_OFFLINE: "1"}
  kubernetes: {namespace: team, shape: SHAPE, shm_gib: 0.5, claims: [{claim: work, path: /data}]}
"""
STEPS = 6


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with connected(2) as found:
        yield found


def rendered(folder: Path, shape: str) -> list[dict[str, Any]]:
    """The objects of a job on two hosts as the file has them, and the Secret that the submission adds; `folder` is the volume /data."""
    spec = write_job(folder, folder / "run", steps=STEPS, addresses={}, extra=KUBERNETES.replace("SHAPE", shape))
    spec.write_text(spec.read_text().replace(str(folder), "/data"))
    job = Job("tiny", load_spec(spec), Path("/submissions/0001"))
    assert KubernetesTarget().problems(job) == []
    token = token_object(job, "5" * 64)
    assert token is not None
    return [*yaml.safe_load_all(KubernetesTarget().render(job).files[FILE]), token]


def indexed_pods(objects: list[dict[str, Any]], hosts: list[Host], folder: Path) -> list[Pod]:
    """The pods that the Job controller makes, by index."""
    job, service = of_kind(objects, "Job"), of_kind(objects, "Service")
    template, meta = job["spec"]["template"], service["metadata"]
    assert service["spec"]["clusterIP"] == "None" and template["spec"]["subdomain"] == meta["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == len(hosts)
    names = [f"{job['metadata']['name']}-{i}" for i in range(len(hosts))]
    known = dict(zip(names, (host.address for host in hosts), strict=True))
    known |= {f"{name}.{meta['name']}.{meta['namespace']}.svc": address for name, address in known.items()}
    return [make_pod(n, h, template, objects, known, folder) for n, h in zip(names, hosts, strict=True)]


def make_pod(
    name: str, host: Host, template: dict[str, Any], objects: list[dict[str, Any]], known: dict[str, str], folder: Path
) -> Pod:
    return Pod(host, name, template["spec"], objects, {"work": folder / "work"}, known, folder / "pods" / name)


class Started:
    """Containers that run; whatever happens, none is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self, pod: Pod, command: Sequence[str] = (), **variables: str) -> subprocess.Popen[bytes]:
        shutil.rmtree(pod.folder, ignore_errors=True)
        self.processes.append(pod.start(self.folder / f"{pod.hostname}.log", command, **variables))
        return self.processes[-1]

    def add_all(self, pods: list[Pod]) -> None:
        self.processes = []
        for index, pod in enumerate(pods):
            self.add(pod, JOB_COMPLETION_INDEX=str(index))

    def codes(self) -> list[int]:
        return [process.wait(400) for process in self.processes]

    def tell(self, index: int) -> None:
        """SIGTERM to a container's first process, as the kubelet sends it."""
        (first,) = psutil.Process(self.processes[index].pid).children()
        first.terminate()

    def text(self) -> str:
        return "".join(log.read_text()[-4000:] for log in sorted(self.folder.glob("*.log")))

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    found = Started(tmp_path)
    yield found
    found.kill()


def alone(folder: Path) -> Path:
    """The output of the same run on this host."""
    output = folder / "alone"
    spec = write_job(folder, output, steps=STEPS, addresses={})
    assert finish(["run", str(spec), "cluster.devices=2"], folder / "alone.log") == 0
    return output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_pods_one_of_which_is_told_to_end_and_two_new_ones_equal_one_host(
    hosts: list[Host], started: Started, tmp_path: Path
) -> None:
    run = tmp_path / "work/run"
    pods = indexed_pods(rendered(tmp_path / "work", "job"), hosts, tmp_path)
    started.add_all(pods)
    wait_until(lambda: steps_done(run) >= 2 or started.processes[0].poll() is not None, started.text)
    started.tell(1)
    assert started.codes() == [75, 75], started.text()
    assert steps_done(run) < STEPS, "it must be told in the middle, or this test shows less"
    started.add_all(pods)
    assert started.codes() == [0, 0], started.text()
    assert outcome(run) == outcome(alone(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_ray_job_in_the_cluster_that_kuberay_starts_equals_one_host(
    hosts: list[Host], started: Started, tmp_path: Path
) -> None:
    """`ray start` with the rendered parameters in each pod, and the submitter's `ray job submit` of the rendered entrypoint."""
    objects = rendered(tmp_path / "work", "rayjob")
    job = of_kind(objects, "RayJob")["spec"]
    cluster, known = job["rayClusterSpec"], {"head": hosts[0].address, "worker": hosts[1].address}
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["authOptions"]["mode"] == "token" and group["replicas"] == 1
    head = make_pod("head", hosts[0], cluster["headGroupSpec"]["template"], objects, known, tmp_path)
    worker = make_pod("worker", hosts[1], group["template"], objects, known, tmp_path)
    submitter = make_pod("submitter", hosts[0], job["submitterPodTemplate"], objects, known, tmp_path)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": of_kind(objects, "Secret")["stringData"]["auth_token"]}
    start = [*ray_start(cluster["headGroupSpec"]), "--head", "--dashboard-host=0.0.0.0"]
    started.add(head, start, RAY_ADDRESS="127.0.0.1:6379", **token)
    wait_until(lambda: hosts[0].answers(8265), started.text)
    started.add(worker, [*ray_start(group), "--address=head:6379"], RAY_ADDRESS="head:6379", **token)
    ask = ["ray", "job", "submit", "--address", "http://head:8265", "--", *shlex.split(job["entrypoint"])]
    assert started.add(submitter, ask, **token).wait(400) == 0, started.text()
    assert outcome(tmp_path / "work/run") == outcome(alone(tmp_path))


def ray_start(group: dict[str, Any]) -> list[str]:
    """What KubeRay 1.6 makes of a group's parameters, without the shell around it."""
    given = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
    return ["ray", "start", "--block", "--dashboard-agent-listen-port=52365", "--metrics-export-port=8080", *given]
