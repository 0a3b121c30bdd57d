"""Jobs on a double of the API server that plays the controllers, through the official client."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch.kubernetes.names import object_name
from nemo_rl_like.launch.kubernetes.target import KubernetesTarget
from nemo_rl_like.launch.submit import Request, submit
from nemo_rl_like.launch.target import Job, JobStatus
from tests.launch.kubernetes.api_server import FORBIDDEN, ApiServer, serving, write_kubeconfig
from tests.launch.kubernetes.controllers import Outcome
from tests.launch.kubernetes.jobs import IMAGE, SHAPES, make_job, make_spec

TINY = object_name(make_job())
HERE = Path("/submissions/0001")
LONG_S = 60.0
"""Longest wait for the double, in seconds."""
Serve = Callable[..., ApiServer]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts a cluster whose pods do as the script says, and makes it the kubeconfig's."""
    with contextlib.ExitStack() as stack:

        def start(script: dict[int, list[Outcome]] | None = None) -> ApiServer:
            server = ApiServer(script)
            monkeypatch.setenv("KUBECONFIG", str(stack.enter_context(serving(server, tmp_path))))
            return server

        yield start


def target(**waits: Any) -> KubernetesTarget:
    return KubernetesTarget(**{"connect_s": 2.0, "read_s": 30.0, "watch_s": 1, **waits})


def start(job: Job) -> str:
    assert target().problems(job) == []
    return target().submit(job, target().render(job))


def wait_for(job_id: str, state: str) -> JobStatus:
    end = time.monotonic() + LONG_S
    while (status := target().status(job_id, HERE)).state != state:
        assert time.monotonic() < end, status
        time.sleep(0.05)
    return status


def read(job_id: str) -> list[str]:
    return list(target().logs(job_id, HERE, follow=True))


def shaped(shape: str, **launch: Any) -> Job:
    kubernetes = {"shape": shape, **launch.pop("kubernetes", {})}
    return make_job(**{"nodes": 2, "retries": 0 if shape == "raycluster" else 2, **launch, "kubernetes": kubernetes})


@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_runs_to_its_end_and_its_log_is_read(shape: str, serve: Serve) -> None:
    server = serve({0: [Outcome(["step 1", "", "step 2 grüße"])]})
    job_id = start(shaped(shape))
    assert read(job_id) == ["step 1", "", "step 2 grüße"]
    status = wait_for(job_id, "done")
    assert status.exit_code == 0
    assert list(target().logs(job_id, HERE, follow=False)) == ["step 1", "", "step 2 grüße"]
    assert {p for p, _, _ in server.objects} >= {"configmaps", "secrets", "pods"}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_failed_job_says_why(shape: str, serve: Serve) -> None:
    serve({0: [Outcome(["boom"], end=1)]})
    job_id = start(shaped(shape, retries=0))
    status = wait_for(job_id, "failed")
    assert status.detail.startswith("Failed")
    if shape.startswith("job"):
        assert status.exit_code == 1


@pytest.mark.parametrize("shape", ["job", "jobset", "rayjob"])
def test_a_failed_job_is_started_again_as_often_as_retries_say(shape: str, serve: Serve) -> None:
    serve({0: [Outcome(["first"], end=1), Outcome(["second"], end=1), Outcome(["third"])]})
    job_id = start(shaped(shape, retries=2))
    assert read(job_id)[-1] == "third"
    wait_for(job_id, "done")


@pytest.mark.parametrize("shape", ["job", "jobset", "rayjob"])
def test_one_failure_more_ends_the_job(shape: str, serve: Serve) -> None:
    serve({0: [Outcome(["first"], end=1), Outcome(["second"], end=1), Outcome(["third"])]})
    job_id = start(shaped(shape, retries=1))
    wait_for(job_id, "failed")
    assert "third" not in read(job_id)


@pytest.mark.parametrize("end", ["evicted", "lost", 75])
@pytest.mark.parametrize("shape", ["job", "jobset"])
def test_disruptions_and_saved_stops_cost_no_retry(shape: str, end: Any, serve: Serve) -> None:
    """Evicted, its host lost, or told to save: with no retry at all the job goes on, however often."""
    serve({0: [Outcome(["part"], end=end)] * 3 + [Outcome(["whole"])]})
    job_id = start(shaped(shape, retries=0))
    assert read(job_id) == ["part", "part", "part", "whole"]
    wait_for(job_id, "done")


@pytest.mark.parametrize("shape", ["job", "jobset"])
def test_a_wrong_spec_is_not_tried_again(shape: str, serve: Serve) -> None:
    serve({0: [Outcome(["spec.yaml: unknown key"], end=2), Outcome(["never"])]})
    job_id = start(shaped(shape, retries=5))
    status = wait_for(job_id, "failed")
    assert status.exit_code == 2 and "PodFailurePolicy" in status.detail
    assert read(job_id) == ["spec.yaml: unknown key"]


def test_one_lost_host_costs_one_retry_however_many_hosts_end_with_it(serve: Serve) -> None:
    """Every host of a job that loses one exits non-zero; with `retries: 1` the second start still comes."""
    serve({i: [Outcome(["first"], end=1, stays_s=0.05), Outcome(["second"])] for i in range(4)})
    job_id = start(shaped("job", nodes=4, retries=1))
    assert read(job_id) == ["first", "second"]
    wait_for(job_id, "done")


def test_hosts_that_end_non_zero_when_the_head_is_done_fail_nothing(serve: Serve) -> None:
    serve({0: [Outcome(["done"], stays_s=0.2)], 1: [Outcome(end="runs")]})
    job_id = start(shaped("job", retries=0))
    wait_for(job_id, "done")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cancelled_job_is_told_and_gone_with_all_it_made(shape: str, serve: Serve) -> None:
    server = serve({0: [Outcome(["step 1"], end="runs")]})
    job_id = start(shaped(shape))
    wait_for(job_id, "running")
    target().cancel(job_id, HERE)
    wait_for(job_id, "unknown")
    end = time.monotonic() + LONG_S
    while server.objects and time.monotonic() < end:
        time.sleep(0.02)
    assert not server.objects
    target().cancel(job_id, HERE)


@pytest.mark.parametrize("shape", ["job", "jobset", "rayjob"])
def test_a_queued_job_waits_for_its_queue(shape: str, serve: Serve) -> None:
    server = serve()
    job_id = start(shaped(shape, kubernetes={"queue": {"kind": "kueue", "name": "research"}}))
    assert wait_for(job_id, "queued").detail.startswith("Suspended")
    assert not [p for p, _, _ in server.objects if p == "pods"]


def test_watches_that_grew_too_old_are_made_again(serve: Serve) -> None:
    """The server forgets its history while nothing has happened yet: the log is read all the same."""
    server = serve({0: [Outcome(["late"])]})
    job_id = start(shaped("job", kubernetes={"queue": {"kind": "kueue", "name": "research"}}))
    lines = target().logs(job_id, HERE, follow=True)
    original = server.of

    def forgetful(plural: str, namespace: str) -> Any:
        if plural == "pods":
            server.compact()  # every list is old when its watch begins
        if server.watches == 3:
            job = next(o for (p, _, _), o in server.objects.items() if p == "jobs")
            job["spec"]["suspend"] = False
        return original(plural, namespace)

    server.of = forgetful  # type: ignore[method-assign]
    assert list(lines) == ["late"]
    assert server.watches >= 3


def test_a_log_whose_connection_breaks_goes_on_where_it_was(serve: Serve) -> None:
    server = serve({0: [Outcome([f"step {i}" for i in range(6)])]})
    server.break_logs_after = 3
    assert read(start(shaped("job"))) == [f"step {i}" for i in range(6)]
    assert server.break_logs_after is None


def test_several_hosts_get_a_token_that_no_file_holds(serve: Serve) -> None:
    server = serve()
    job = shaped("job")
    start(job)
    secret = next(o for (p, _, _), o in server.objects.items() if p == "secrets")
    token = secret["stringData"]["auth_token"]
    assert len(token) == 64 and len(set(token)) > 4
    assert token not in str(target().render(job).files)
    start(make_job("other", nodes=2))
    tokens = {o["stringData"]["auth_token"] for (p, _, _), o in server.objects.items() if p == "secrets"}
    assert len(tokens) == 2


def test_a_submission_keeps_no_token_on_this_machine(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    spec = make_spec(
        {"image": IMAGE, "nodes": 2, "kubernetes": {"claims": [{"claim": "work", "path": str(tmp_path)}]}},
        output=f"{tmp_path}/run",
    )
    (made,) = submit(Request(spec, "kubernetes", tmp_path))
    (secret,) = (o for (kind, _, _), o in server.objects.items() if kind == "secrets")
    assert sorted(p.name for p in made.folder.iterdir()) == ["kubernetes.yaml", "record.json", "spec.yaml"]
    token = secret["stringData"]["auth_token"].encode()
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and token in p.read_bytes()]


def test_processes_get_the_variables_of_the_spec(serve: Serve) -> None:
    server = serve()
    job = make_job(
        environment={"PRICE": "$(HOME) $$5 $"}, secrets={"A": {"env": "T", "kubernetes": {"secret": "s", "key": "k"}}}
    )
    wait_for(start(job), "done")
    (variables,) = server.kubelet.environments.values()
    assert variables["PRICE"] == "$(HOME) $$5 $" and variables["T"] == "<s/k>"
    assert variables["NRL_HEAD_HOST"] == f"{TINY}-0.{TINY}.default.svc" and variables["RAY_AUTH_MODE"] == "token"


def test_a_name_that_is_taken_is_told_and_nothing_is_left(serve: Serve) -> None:
    server = serve({0: [Outcome(end="runs")]})
    start(shaped("job"))
    with pytest.raises(
        SubmitError, match=rf"ConfigMap '{TINY}' in namespace 'default': .* already exists; end that one first"
    ):
        target().submit(shaped("job"), target().render(shaped("job")))
    helpers = {("configmaps", "default", TINY), ("services", "default", TINY), ("secrets", "default", f"{TINY}-ray")}
    assert helpers <= set(server.objects)  # those of the job that is there stay
    for helper in helpers:
        server.objects.pop(helper)
    with pytest.raises(SubmitError, match=rf"Job '{TINY}' in namespace 'default': .* already exists"):
        target().submit(shaped("job"), target().render(shaped("job")))
    assert not helpers & set(server.objects)


def test_what_the_server_does_not_take_is_told_in_its_words(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve()
    from nemo_rl_like.launch.kubernetes import manifests

    monkeypatch.setattr(manifests, "main_objects", lambda job: [_misspelt(job)])
    job = make_job()
    with pytest.raises(SubmitError, match="the cluster does not take it: .*completionsMode"):
        target().dry_run(job, target().render(make_job()))


def _misspelt(job: Job) -> dict[str, Any]:
    from nemo_rl_like.launch.kubernetes.shapes import indexed_job

    made = indexed_job(job)
    made["spec"]["completionsMode"] = made["spec"].pop("completionMode")
    return made


def test_a_dry_run_keeps_nothing(serve: Serve) -> None:
    server = serve()
    for shape in SHAPES:
        job = shaped(shape, kubernetes={"queue": {"kind": "volcano", "name": "q"}})
        target().dry_run(job, target().render(job))
    assert not server.objects


def test_a_token_that_expired_is_told(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    config = write_kubeconfig(tmp_path, f"https://127.0.0.1:{server.port}", token="old")
    monkeypatch.setenv("KUBECONFIG", str(config))
    with pytest.raises(SubmitError, match=r"does not know you \(Unauthorized\).* expired"):
        target().status("job:default/tiny", HERE)


def test_a_namespace_that_is_forbidden_is_told(serve: Serve) -> None:
    serve()
    job = make_job(kubernetes={"namespace": FORBIDDEN})
    with pytest.raises(SubmitError, match=r"you may not \(User \"tester\""):
        target().dry_run(job, target().render(job))


def test_a_server_that_does_not_answer_is_told_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")))
        with pytest.raises(SubmitError, match=r"does not answer within 2 s to connect and 0\.5 s to read"):
            target(read_s=0.5).status("job:default/tiny", HERE)
    with pytest.raises(SubmitError, match="does not answer"):
        target().status("job:default/tiny", HERE)


def test_a_context_that_is_not_there_is_told(serve: Serve) -> None:
    serve()
    job = make_job(kubernetes={"context": "elsewhere"})
    with pytest.raises(SubmitError, match=r"`launch.kubernetes.context` is 'elsewhere'"):
        target().dry_run(job, target().render(job))


def test_an_id_keeps_where_the_job_is(serve: Serve) -> None:
    serve()
    job_id = start(make_job(kubernetes={"context": "tests", "namespace": "team-a"}))
    assert job_id == f"job:team-a/{TINY}@tests"
    wait_for(job_id, "done")
    with pytest.raises(SubmitError, match="is no job on Kubernetes"):
        target().status("4711", HERE)


def test_a_pod_that_cannot_start_says_why(serve: Serve) -> None:
    server = serve({0: [Outcome(end="runs")]})
    job_id = start(make_job())
    wait_for(job_id, "running")
    pod = next(o for (p, _, _), o in server.objects.items() if p == "pods")
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
    }
    pod["status"] = {"phase": "Pending", "conditions": [scheduled]}
    assert "4 Insufficient nvidia.com/gpu" in target().status(job_id, HERE).detail
    waiting = {"name": "node", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    pod["status"] = {"phase": "Pending", "containerStatuses": [waiting]}
    assert "ImagePullBackOff, no such image" in target().status(job_id, HERE).detail
