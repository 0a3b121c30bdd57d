"""The words of `docker run` and `podman run`, read by a double of the program that knows no others."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch import container as module
from nemo_rl_like.launch.container import ContainerTarget
from nemo_rl_like.launch.target import Job
from tests.launch.kubernetes.jobs import IMAGE, make_spec

DOUBLE = Path(__file__).parent / "docker_double.py"
SECRETS = {"HUB": {"env": "HF_TOKEN"}}


class Machine:
    """A machine with a double of docker and podman in its PATH, and a folder to mount."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.state, self.folder = folder / "data, 1", folder / "state", folder / "run.jobs"
        for path in (self.data, self.state, self.folder, folder / "bin"):
            path.mkdir()
        (self.folder / "spec.yaml").touch()
        for program in ("docker", "podman"):
            (folder / "bin" / program).write_text(
                f'#!/bin/sh\nexec "{sys.executable}" "{DOUBLE}" "$@"\n', encoding="utf-8"
            )
            (folder / "bin" / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("DOUBLE_STATE", str(self.state))
        monkeypatch.setenv("DOUBLE_IMAGE", IMAGE)
        monkeypatch.setenv("HF_TOKEN", "hf_sesame")

    def job(self, secrets: dict[str, Any] | None = None, **launch: Any) -> Job:
        mount = {"source": str(self.data), "target": str(self.data)}
        block = {"image": IMAGE, "mounts": [mount], "retries": 0, **launch}
        block["container"] = {"user": "1000:1000", **block.get("container", {})}
        return Job("tiny", make_spec(block, secrets, output=f"{self.data}/run"), self.folder)

    def asked(self) -> dict[str, Any]:
        """What the last container was started with."""
        (path,) = self.state.glob("*.json")
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def start(job: Job) -> str:
    target = ContainerTarget()
    assert target.problems(job) == []
    rendered = target.render(job)
    target.dry_run(job, rendered)
    return target.submit(job, rendered)


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_a_container_gets_what_the_spec_says_and_may_do_no_more(runtime: str, machine: Machine) -> None:
    job = machine.job(
        secrets=SECRETS,
        devices_per_node=2,
        cpus_per_node=16,
        memory_gib_per_node=64.0,
        retries=3,
        environment={"A": "x=y, z $HOME"},
        container={"runtime": runtime, "shm_gib": 12.5},
    )
    job_id = start(job)
    assert job_id.startswith(f"{runtime}:")
    asked = machine.asked()
    assert (asked["user"], asked["cap_drop"], asked["security_opt"]) == ("1000:1000", "ALL", "no-new-privileges")
    assert asked["read_only"] is True
    assert (asked["cpus"], asked["memory"], asked["shm_size"], asked["restart"]) == (
        "16",
        "65536m",
        "12800m",
        "on-failure:3",
    )
    assert int(asked["stop_timeout"]) >= job.spec.launch.save_before_end_s
    assert asked["environment"] == {
        "A": "x=y, z $HOME",
        "HOME": "/home/nrl",
        "RAY_AUTH_MODE": "token",
        "HF_TOKEN": "hf_sesame",
    }
    data = {"type": "bind", "source": str(machine.data), "target": str(machine.data)}
    spec = {
        "type": "bind",
        "source": str(machine.folder / "spec.yaml"),
        "target": "/etc/nrl/spec/spec.yaml",
        "readonly": "",
    }
    assert asked["mounts"] == [data, spec]
    assert (asked["image"], asked["entrypoint"], asked["command"]) == (
        IMAGE,
        "nrl",
        ["node", "/etc/nrl/spec/spec.yaml"],
    )
    if runtime == "docker":
        assert (asked["gpus"], asked["device"], asked["userns"]) == ("2", [], None)
    else:
        assert (
            asked["device"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
            and asked["userns"] == "keep-id:uid=1000,gid=1000"
        )


def test_no_value_of_a_secret_is_in_the_words(machine: Machine) -> None:
    assert "hf_sesame" not in str(ContainerTarget().render(machine.job(secrets=SECRETS)))


def test_a_secret_that_is_not_set_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(SubmitError, match="HF_TOKEN: not set in this environment"):
        start(machine.job(secrets=SECRETS))


hostile = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)


@given(value=hostile, folder=hostile)
@settings(max_examples=100, deadline=None)
def test_no_text_becomes_another_word(value: str, folder: str) -> None:
    """Hostile values change their own word alone, and a mount of any path is read as that path."""
    import csv

    def words(value: str, folder: str) -> tuple[str, ...]:
        mount = {"source": f"/{folder}", "target": f"/data/{folder}"}
        spec = make_spec({"image": IMAGE, "mounts": [mount], "environment": {"A": value}})
        return ContainerTarget("1000:1000").render(Job("tiny", spec, Path("/submissions"))).command

    plain, given_ = words("x", "y"), words(value, folder)
    differs = [i for i, (a, b) in enumerate(zip(plain, given_, strict=True)) if a != b]
    assert {plain[i] for i in differs} <= {"A=x", "type=bind,source=/y,target=/data/y"}
    assert f"A={value}" in given_
    mounts = [next(csv.reader([given_[i + 1]])) for i, word in enumerate(given_) if word == "--mount"]
    assert ["type=bind", f"source=/{folder}", f"target=/data/{folder}"] in mounts


def test_state_log_and_end_are_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOUBLE_LINES", "step 1\nstep 2")
    target, job_id = ContainerTarget(), start(machine.job())
    assert target.status(job_id, machine.folder).state == "running"
    assert list(target.logs(job_id, machine.folder, follow=False)) == ["step 1", "step 2"]
    following = target.logs(job_id, machine.folder, follow=True)
    assert next(following) == "step 1"
    target.cancel(job_id, machine.folder)
    assert list(following) == ["step 2"]
    status = target.status(job_id, machine.folder)
    assert (status.state, status.exit_code) == ("cancelled", 75)
    target.cancel(job_id, machine.folder)


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (1, "failed"), (2, "failed"), (137, "failed")])
def test_an_exit_code_is_the_drivers(code: int, state: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOUBLE_EXIT", str(code))
    status = ContainerTarget().status(start(machine.job()), machine.folder)
    assert (status.state, status.exit_code) == (state, code)


def test_a_container_that_was_removed_is_unknown(machine: Machine) -> None:
    job_id = start(machine.job())
    next(machine.state.glob("*.json")).unlink()
    assert ContainerTarget().status(job_id, machine.folder).state == "unknown"
    ContainerTarget().cancel(job_id, machine.folder)


def test_a_name_that_is_taken_is_told(machine: Machine) -> None:
    start(machine.job())
    with pytest.raises(SubmitError, match='The container name "/nrl-tiny-[0-9a-f]{8}" is already in use'):
        start(machine.job())


def test_a_runtime_that_is_not_there_dead_slow_or_without_the_image_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, target = machine.job(), ContainerTarget()
    monkeypatch.setenv("DOUBLE_IMAGE", "other")
    with pytest.raises(SubmitError, match=f"No such image.*`docker pull {IMAGE}` first"):
        target.dry_run(job, target.render(job))
    monkeypatch.setenv("DOUBLE_DEAD", "1")
    with pytest.raises(SubmitError, match="Is the docker daemon running"):
        target.dry_run(job, target.render(job))
    monkeypatch.delenv("DOUBLE_DEAD")
    monkeypatch.setenv("DOUBLE_SLOW", "1")
    monkeypatch.setattr(module._ask, "__kwdefaults__", {"deadline_s": 0.5})
    with pytest.raises(SubmitError, match=r"`docker version` did not end within 0\.5 s"):
        target.dry_run(job, target.render(job))
    monkeypatch.setenv("PATH", str(machine.state))
    with pytest.raises(SubmitError, match="`docker` is not on this machine"):
        target.dry_run(job, target.render(job))


CASES: list[tuple[dict[str, Any], str]] = [
    ({"image": None}, "`launch.image` is not set"),
    ({"nodes": 2}, "`launch.nodes` is 2"),
    ({"time_limit_min": 60}, "`launch.time_limit_min` is 60"),
    ({"mounts": []}, "`output` is "),
    ({"mounts": [{"source": "OUTPUT", "target": "OUTPUT"}]}, "`output` is "),
    ({"environment": {"HOME": "/x"}}, "`launch.environment.HOME`"),
    ({"memory_gib_per_node": 4.0}, "`launch.container.shm_gib` is 8"),
]


@pytest.mark.parametrize(("changes", "message"), CASES)
def test_what_one_container_cannot_honour_is_named(changes: dict[str, Any], message: str, machine: Machine) -> None:
    given = json.loads(json.dumps(changes).replace("OUTPUT", f"{machine.data}/run"))
    (problem,) = ContainerTarget().problems(machine.job(**given))
    assert problem.startswith(message)


def test_root_runs_no_container(machine: Machine) -> None:
    job = machine.job()
    spec = make_spec(job.spec.launch.model_dump(mode="json") | {"container": {}}, output=job.spec.output)
    assert ContainerTarget("1000:100").problems(replace(job, spec=spec)) == []
    (problem,) = ContainerTarget("0:0").problems(replace(job, spec=spec))
    assert "you are root" in problem
