"""Manifests fit the schemas of those who read them, keep pods harmless, and equal the files that a reader reviewed."""

from __future__ import annotations

import copy
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_rl_like.launch.kubernetes import names
from nemo_rl_like.launch.kubernetes.manifests import helper_objects, main_objects, to_yaml, token_object
from nemo_rl_like.launch.kubernetes.ray import RAY_VERSION
from nemo_rl_like.launch.kubernetes.target import FILE, KubernetesTarget
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.loader import load_spec
from tests.launch.kubernetes.controllers import expanded
from tests.launch.kubernetes.jobs import SHAPES, full_job, make_job
from tests.launch.kubernetes.schemas import Unfit, check

TINY = make_job()
EXAMPLES = Path(__file__).parents[3] / "k8s/examples"
QUEUES = (None, "kueue", "volcano", "kai")
CASES = [(s, q) for s, q in itertools.product(SHAPES, QUEUES) if not (q == "kai" and s.startswith("ray"))]


def objects(job: Job) -> list[dict[str, Any]]:
    secret = token_object(job, "0" * 64)
    return [*helper_objects(job), *([secret] if secret else []), *main_objects(job)]


def pods(value: Any) -> list[dict[str, Any]]:
    """Every pod spec in a manifest."""
    if isinstance(value, dict):
        own = [value] if "containers" in value else []
        return own + [p for v in value.values() for p in pods(v)]
    return [p for v in value for p in pods(v)] if isinstance(value, list) else []


@pytest.mark.parametrize(("shape", "queue"), CASES)
def test_every_object_fits_its_schema_with_no_unknown_field(shape: str, queue: str | None) -> None:
    for manifest in objects(full_job(shape, queue)):
        check(manifest)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_schemas_refuse_a_misspelt_field(shape: str) -> None:
    manifest = copy.deepcopy(main_objects(full_job(shape, None))[0])
    pods(manifest)[0]["containers"][0]["imagee"] = "x"
    with pytest.raises(Unfit):
        check(manifest)


@pytest.mark.parametrize("shape", SHAPES)
def test_rendered_files_equal_the_examples(shape: str) -> None:
    """`python -m tests.launch.kubernetes.test_manifests` writes them anew; read the difference before you commit it."""
    assert rendered(shape) == (EXAMPLES / f"{shape}.yaml").read_text(encoding="utf-8")


def rendered(shape: str) -> str:
    """A rendered file with a word for the spec itself, which changes with every field of every stage."""
    written = KubernetesTarget().render(full_job(shape, None)).files[FILE]
    shown, count = re.subn(
        r"^  spec.yaml: \|\n(?:    .*\n|\n)+", '  spec.yaml: "# the resolved spec"\n', written, flags=re.MULTILINE
    )
    assert count == 1
    return shown


@pytest.mark.parametrize("shape", SHAPES)
def test_kueue_admits_the_whole_job(shape: str) -> None:
    """Its label stands on what Kueue knows, which does not run until Kueue lets it."""
    carrier = main_objects(full_job(shape, "kueue"))[0]
    assert carrier["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert carrier["spec"]["suspend"] is True


@pytest.mark.parametrize("shape", ["job", "jobset"])
def test_volcano_places_all_hosts_as_one_group(shape: str) -> None:
    job = full_job(shape, "volcano")
    (group,) = (m for m in objects(job) if m["kind"] == "PodGroup")
    assert group["spec"] == {"minMember": 2, "queue": "research"}
    carrier = main_objects(job)[0]
    (pod,) = pods(carrier)
    assert pod["schedulerName"] == "volcano"
    assert f"'scheduling.k8s.io/group-name': '{group['metadata']['name']}'" in str(carrier)


@pytest.mark.parametrize("shape", ["rayjob", "raycluster"])
def test_kuberay_is_told_to_ask_volcano(shape: str) -> None:
    carrier = main_objects(full_job(shape, "volcano"))[0]
    assert carrier["metadata"]["labels"]["volcano.sh/queue-name"] == "research"
    assert carrier["metadata"]["labels"]["ray.io/scheduler-name"] == "volcano"


@pytest.mark.parametrize("shape", ["job", "jobset"])
def test_kai_places_pods_of_its_queue(shape: str) -> None:
    carrier = main_objects(full_job(shape, "kai"))[0]
    assert pods(carrier)[0]["schedulerName"] == "kai-scheduler"
    assert str(carrier).count("'kai.scheduler/queue': 'research'") == 2  # the job and its pods


@pytest.mark.parametrize("shape", SHAPES)
def test_pods_meet_the_restricted_standard(shape: str) -> None:
    """Kubernetes' pod security standard `restricted`, without RDMA."""
    for pod in [p for m in main_objects(make_job(nodes=2, retries=0, kubernetes={"shape": shape})) for p in pods(m)]:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert not [v for v in pod["volumes"] if "hostPath" in v]
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_only_rdma_adds_a_capability() -> None:
    with_rdma = main_objects(make_job(kubernetes={"rdma": {"resource": "rdma/ib"}}))[0]
    container = pods(with_rdma)[0]["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"]["rdma/ib"] == "1"


@pytest.mark.parametrize("shape", SHAPES)
def test_devices_of_a_job_are_those_of_its_hosts(shape: str) -> None:
    """Requests equal limits, and pods times devices are `nodes * devices_per_node`: no host of KubeRay's head comes on top."""
    carrier = main_objects(make_job(nodes=3, devices_per_node=4, retries=0, kubernetes={"shape": shape}))[0]
    total = 0
    for pod in pods(carrier):
        resources = pod["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
        total += int(resources["limits"].get("nvidia.com/gpu", 0)) * _replicas(carrier, pod)
    assert total == 12


def _replicas(carrier: dict[str, Any], pod: dict[str, Any]) -> int:
    spec = carrier["spec"]
    if carrier["kind"] == "Job":
        return int(spec["completions"])
    if carrier["kind"] == "JobSet":
        return int(spec["replicatedJobs"][0]["template"]["spec"]["completions"])
    cluster = spec.get("rayClusterSpec", spec)
    return next((g["replicas"] for g in cluster["workerGroupSpecs"] if g["template"]["spec"] is pod), 1)


def test_a_pod_is_given_time_to_save_and_ends_within_the_wall_time() -> None:
    job = main_objects(make_job(time_limit_min=60, save_before_end_s=600.0))[0]
    grace = pods(job)[0]["terminationGracePeriodSeconds"]
    assert grace >= 600
    assert job["spec"]["activeDeadlineSeconds"] + 600 == 3600


def test_the_spec_that_pods_mount_is_the_spec(tmp_path: Path) -> None:
    job = make_job(environment={"GREETING": "grüße $(HOME)", "YES": "on"}, secrets=_SECRET)
    mounted = next(m for m in objects(job) if m["kind"] == "ConfigMap")["data"]["spec.yaml"]
    (tmp_path / "spec.yaml").write_text(mounted, encoding="utf-8")
    assert load_spec(tmp_path / "spec.yaml") == job.spec
    assert names.SPEC_FILE in pods(main_objects(job)[0])[0]["containers"][0]["command"]


_SECRET = {"HUB": {"env": "HF_TOKEN", "kubernetes": {"secret": "hub", "key": "token"}}}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_value_of_a_secret_is_rendered(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    job = make_job(secrets=_SECRET, nodes=2, retries=0, kubernetes={"shape": shape})
    text = KubernetesTarget().render(job).files[FILE]
    assert "hf_sesame" not in text and "kind: Secret" not in text
    assert "'secretKeyRef': {'name': 'hub', 'key': 'token'}" in str(pods(main_objects(job)[0]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("auth", ["token", "disabled"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_hosts_that_must_know_each_other_get_a_token_where_the_spec_asks_for_one(
    shape: str, auth: str, nodes: int
) -> None:
    """A run on one host makes its own: no pod's Ray is open to the cluster."""
    made = objects(make_job(nodes=nodes, retries=0, auth=auth, kubernetes={"shape": shape}))
    for manifest in made:
        check(manifest)
    asked = auth == "token" and (nodes > 1 or "ray" in shape)
    assert any(m["kind"] == "Secret" for m in made) == asked
    hosts = [p for m in made for p in pods(m) if p["containers"][0]["name"] != "submitter"]
    for pod in hosts:
        variables = {v["name"]: v["value"] for v in pod["containers"][0]["env"]}
        assert variables["RAY_AUTH_MODE"] == auth and ("RAY_AUTH_TOKEN_PATH" in variables) == asked
        assert any("secret" in v for v in pod["volumes"]) == asked
    assert ("secretName" in str(made)) == asked and ("'mode': 'token'" in str(made)) == (asked and "ray" in shape)


HOSTILE = [
    "1e3", "0o7", "on", "NO", "y", "~", "1_000", "0x1F", "12:30:45", "<<", "=", "- a\n- b", "a: b", "# x", "{{.}}", "$(HOME)", "$$", "$", "2001-01-01",
    " lead", "trail ", "\ttab", "a\n\n", "\n", "'", '"', "\\n", "\x85", "\u2028", "\ufeff", "!!python/object", "&a", "*a", "---", "...", "%YAML", "0.", ".5",
    "+1", "-0", "1.", ".inf", ".NaN", "null", "infinity", "a\nb", "a\n b\n", "e", "E1", "1E", "0b1", "0777", "x\r\ny",
]  # fmt: skip
hostile = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30) | st.sampled_from(HOSTILE)


@given(st.lists(hostile, min_size=1, max_size=5))
@example(["$$", "$$$", "a$$(V0)"])
@example(["x", "$(V0)"])
@settings(max_examples=60, deadline=None)
def test_any_text_reaches_the_process_as_it_is(values: list[str]) -> None:
    """Through YAML, and through Kubernetes' own replacement of `$(NAME)`."""
    given_ = {f"V{i}": v.replace("\n", " ") for i, v in enumerate(values)}  # the spec takes one line a variable
    read = yaml.safe_load(to_yaml(main_objects(make_job(environment=given_))))
    assert {k: v for k, v in expanded(pods(read)[0]["containers"][0]["env"]).items() if k in given_} == given_


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_name_becomes_one_that_dns_takes(name: str) -> None:
    made = names.object_name(replace(TINY, name=name))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made) and len(made) <= names.LONGEST_NAME


def test_a_job_that_is_submitted_again_has_a_name_of_its_own() -> None:
    job = make_job("x" * 60)
    again = replace(job, folder=job.folder.parent / "0002")
    assert names.object_name(job) != names.object_name(again)
    assert max(len(names.object_name(j)) for j in (job, again)) <= names.LONGEST_NAME


def test_a_job_runs_as_far_as_it_was_asked() -> None:
    for shape in SHAPES:
        carrier = main_objects(replace(make_job(retries=0, kubernetes={"shape": shape}), until="sft $(HOME)"))
        assert "--until" in str(carrier)
    command = pods(main_objects(replace(make_job(), until="sft $(HOME)"))[0])[0]["containers"][0]["command"]
    assert command == ["nrl", "node", "/etc/nrl/spec/spec.yaml", "--until", "sft $$(HOME)"]


@given(st.text("abAB01-_", max_size=6), st.text("abAB01-_", max_size=6))
@settings(max_examples=200, deadline=None)
def test_two_names_stay_two(one: str, other: str) -> None:
    same = names.object_name(replace(TINY, name=one)) == names.object_name(replace(TINY, name=other))
    assert same == (one == other)


def test_the_name_of_a_pod_fits_a_host_name() -> None:
    """The longest: `NAME-node-0-INDEX-RANDOM` of a JobSet on 9999 hosts."""
    assert len(f"{'a' * names.LONGEST_NAME}-node-0-9999-abcde") <= 63
    assert names.LONGEST_NAME <= 47  # KubeRay's for a RayJob


def test_ray_is_the_version_that_the_image_has() -> None:
    assert f'"ray[default]=={RAY_VERSION}"' in (Path(__file__).parents[3] / "pyproject.toml").read_text(
        encoding="utf-8"
    )


def test_rendering_imports_no_client() -> None:
    code = (
        "import sys, nemo_rl_like.launch.kubernetes.target, nemo_rl_like.launch.container, nemo_rl_like.launch.nemo_run;"
        "print([m for m in ('kubernetes', 'nemo_run', 'torch', 'ray', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


if __name__ == "__main__":
    for name in SHAPES:
        (EXAMPLES / f"{name}.yaml").write_text(rendered(name), encoding="utf-8")
