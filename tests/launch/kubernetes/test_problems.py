"""What Kubernetes cannot honour is told before anything is created: each message names the field and the fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_like.launch.kubernetes import problems
from nemo_rl_like.launch.kubernetes.target import KubernetesTarget
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import resolved_yaml
from tests.launch.kubernetes.jobs import CLAIM, SHAPES, full_job, make_job, make_spec

REFERENCE = {"secret": "hub", "key": "token"}

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("image", {"image": None}, "`launch.image` is not set"),
    ("image-option", {"image": "--privileged"}, "`launch.image` is '--privileged'"),
    ("host-folder", {"mounts": [{"source": "/a", "target": "/b"}]}, "`launch.mounts` has '/a'"),
    ("variable", {"environment": {"HOME": "/x"}}, "`launch.environment.HOME` is set by the job itself"),
    ("secret", {"secrets": {"HUB": {"env": "T"}}}, "`secrets.HUB` has no `kubernetes`"),
    (
        "secret-twice",
        {"secrets": {"A": {"env": "T", "kubernetes": REFERENCE}, "B": {"env": "T", "kubernetes": {**REFERENCE, "key": "x"}}}},
        "`secrets.B.env` is T, which another secret sets",
    ),
    (
        "secret-and-variable",
        {"environment": {"T": "1"}, "secrets": {"A": {"env": "T", "kubernetes": REFERENCE}}},
        "`secrets.A.env` is T, which `launch.environment`",
    ),
    ("shm", {"memory_gib_per_node": 8.0}, "`launch.kubernetes.shm_gib` is 8, and its pages count"),
    ("store", {"kubernetes": {"shm_gib": 0.5}}, "`cluster.object_store_gib` is 1"),
    ("output", {"kubernetes": {"claims": []}}, "`output` is '/data/run', and it or the folder run.jobs beside it"),
    ("output-read", {"kubernetes": {"claims": [{**CLAIM, "read_only": True}]}}, "`output` is '/data/run'"),
    ("path-twice", {"kubernetes": {"claims": [CLAIM, {"claim": "b", "path": "/data/"}]}}, "has the path /data 2 times"),
    ("path-taken", {"kubernetes": {"claims": [CLAIM, {"claim": "b", "path": "/home"}]}}, "the path /home, which the job itself uses"),
    ("dots", {"kubernetes": {"claims": [CLAIM, {"claim": "b", "path": "/a/../b"}]}}, "the path '/a/../b'"),
    ("label", {"kubernetes": {"labels": {"kai.scheduler/queue": "x"}}}, "`launch.kubernetes.labels.kai.scheduler/queue`"),
    ("ray-time", {"time_limit_min": 60, "kubernetes": {"shape": "rayjob"}}, "`launch.time_limit_min` is 60, and KubeRay"),
    ("ray-retries", {"kubernetes": {"shape": "raycluster"}}, "`launch.retries` is 3"),
    ("ray-kai", {"kubernetes": {"shape": "rayjob", "queue": {"kind": "kai", "name": "q"}}}, "`launch.kubernetes.queue.kind` is kai"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_cannot_be_honoured_is_named(changes: dict[str, Any], message: str) -> None:
    (problem,) = KubernetesTarget().problems(make_job(**changes))
    assert message in problem


def test_a_spec_that_no_map_holds_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems.LARGEST_MAP <= 1 << 20  # bytes, the API's own limit
    monkeypatch.setattr(problems, "LARGEST_MAP", len(resolved_yaml(make_job().spec).encode()))
    assert KubernetesTarget().problems(make_job()) == []
    (problem,) = KubernetesTarget().problems(make_job(environment={"X": "xxx"}))
    assert problem.startswith("the spec has ")


@pytest.mark.parametrize("output", ["runs/x", "/other/run", "/data/../etc", "/workshop", "/data"])
def test_an_output_outside_of_the_volumes_is_a_problem(output: str) -> None:
    spec = make_spec({"image": "x", "kubernetes": {"claims": [CLAIM]}}, output=output)
    (problem,) = KubernetesTarget().problems(replace(make_job(), spec=spec))
    assert problem.startswith(f"`output` is {output!r}")


def test_a_file_that_no_volume_holds_is_a_problem() -> None:
    launch = {"image": "x", "kubernetes": {"claims": [CLAIM]}}
    data = {"path": "/data/pairs.jsonl"}
    stages = [
        {"kind": "preference", "data": data},
        {"kind": "pretrain", "data": {"paths": ["/data/a", "b.txt", "/data/../c"]}},
    ]
    values = {**make_spec(launch).model_dump(mode="json"), "stages": stages}
    found = KubernetesTarget().problems(replace(make_job(), spec=ExperimentSpec.model_validate(values)))
    assert [f.partition(", which")[0] for f in found] == [
        "`stages[1].data.paths[1]` is 'b.txt'",
        "`stages[1].data.paths[2]` is '/data/../c'",
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_job_has_no_problem(shape: str) -> None:
    job: Job = full_job(shape, None)
    assert KubernetesTarget().problems(job) == []


@pytest.mark.parametrize(
    "field",
    [
        {"namespace": "a/b"},
        {"namespace": "x\n"},
        {"priority_class": "a b"},
        {"queue": {"kind": "kueue", "name": "Q"}},
        {"labels": {"a": "b c"}},
        {"labels": {"a\n": "b"}},
        {"node_selector": {"": "x"}},
        {"claims": [{"claim": "w", "path": "work"}]},
        {"claims": [{"claim": "w", "path": "/a:b"}]},
        {"claims": [{"claim": "w", "path": "/w", "sub_path": "/etc"}]},
        {"user": 0},
        {"gpu_resource": "a b/c"},
    ],
)
def test_names_that_kubernetes_refuses_are_no_spec(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="launch.kubernetes"):
        make_job(kubernetes=field)
