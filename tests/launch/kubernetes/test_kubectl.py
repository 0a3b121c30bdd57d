"""The real kubectl reads what is rendered, runs jobs on the double of the API server, and builds the folder `k8s/`."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from nemo_rl_like.launch.kubernetes.manifests import main_objects, to_yaml
from nemo_rl_like.launch.kubernetes.names import object_name
from nemo_rl_like.launch.kubernetes.target import FILE, KubernetesTarget
from tests.launch.kubernetes.api_server import ApiServer, serving
from tests.launch.kubernetes.controllers import Outcome
from tests.launch.kubernetes.jobs import make_job
from tests.launch.kubernetes.kubectl import kubectl
from tests.launch.kubernetes.schemas import check
from tests.launch.kubernetes.test_manifests import HOSTILE

TINY = object_name(make_job())
K8S = Path(__file__).parents[3] / "k8s"
RULES = "{extends: default, rules: {line-length: disable, document-start: disable, indentation: {indent-sequences: whatever}}}"


def test_any_text_is_the_same_to_gos_parser(tmp_path: Path) -> None:
    """Texts that YAML's versions take for numbers, dates or words, read by kubectl's own parser; it asks the server only which kinds it has."""
    draw = random.Random(1)
    letters = "aé😀\t\n \"'\\:#-?[]{},&*!|>%@`~0123456789.eExXoO_+=<$()\u2028\u0085\ufeff"
    texts = [*HOSTILE, *("".join(draw.choices(letters, k=draw.randint(0, 12))) for _ in range(1500))]
    data = {f"k{i}": text for i, text in enumerate(texts)}
    group = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "texts"}, "data": data}
    (tmp_path / "all.yaml").write_text(to_yaml([group]), encoding="utf-8")
    words = ("create", "--dry-run=client", "--validate=false", "-o", "json", "-f", str(tmp_path / "all.yaml"))
    with serving(ApiServer(), tmp_path) as kubeconfig:
        assert json.loads(kubectl(*words, kubeconfig=kubeconfig))["data"] == data


def test_kubectl_starts_a_rendered_file_and_follows_it(tmp_path: Path) -> None:
    server = ApiServer({0: [Outcome(["part"], end="evicted"), Outcome(["whole"])]})
    rendered = KubernetesTarget().render(make_job())
    (tmp_path / FILE).write_text(rendered.files[FILE], encoding="utf-8")
    assert rendered.command == ("kubectl", "create", "-f", FILE)
    with serving(server, tmp_path) as kubeconfig:
        made = kubectl("create", "--validate=false", "-f", str(tmp_path / FILE), kubeconfig=kubeconfig)
        assert f"job.batch/{TINY} created" in made and f"service/{TINY} created" in made
        kubectl("wait", "--for=condition=complete", "--timeout=60s", f"job/{TINY}", kubeconfig=kubeconfig)
        listed = json.loads(kubectl("get", "pods", "-o", "json", kubeconfig=kubeconfig))["items"]
        (last,) = (p for p in listed if p["status"]["phase"] == "Succeeded")
        assert kubectl("logs", last["metadata"]["name"], kubeconfig=kubeconfig) == "whole\n"
        kubectl("delete", "job", TINY, "--wait=false", kubeconfig=kubeconfig)
        end = time.monotonic() + 60
        while [k for k in server.objects if k[0] in ("jobs", "pods")]:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_kubectl_is_refused_a_field_that_is_not_there(tmp_path: Path) -> None:
    job = main_objects(make_job())[0]
    job["spec"]["backoffLimits"] = 1
    (tmp_path / FILE).write_text(to_yaml([job]), encoding="utf-8")
    with (
        serving(ApiServer(), tmp_path) as kubeconfig,
        pytest.raises(AssertionError, match="backoffLimits"),
    ):
        kubectl("create", "--validate=false", "-f", str(tmp_path / FILE), kubeconfig=kubeconfig)


def built() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(kubectl("kustomize", str(K8S / "base"))))


def test_the_base_builds_and_fits_the_schemas() -> None:
    kinds = []
    for manifest in built():
        check(manifest)
        kinds.append(manifest["kind"])
        assert manifest["metadata"].get("namespace", "nrl") == "nrl"
    assert sorted(kinds) == ["Namespace", "NetworkPolicy", "PersistentVolumeClaim", "Role", "ServiceAccount"]


def test_the_policy_of_the_base_means_the_pods_of_jobs() -> None:
    policy = next(m for m in built() if m["kind"] == "NetworkPolicy")
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    template = main_objects(make_job())[0]["spec"]["template"]
    assert wanted.items() <= template["metadata"]["labels"].items()
    assert (
        policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items()
        <= template["metadata"]["labels"].items()
    )


def test_the_role_of_the_base_allows_what_a_submission_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request of the whole life of each shape, as the double saw them."""
    server = ApiServer({0: [Outcome(["x"])]})
    server.kubelet.pull_s = 0.3
    rules = next(m for m in built() if m["kind"] == "Role")["rules"]
    allowed = {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    target = KubernetesTarget(watch_s=1)
    with serving(server, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        for number, shape in enumerate(("job", "jobset", "rayjob", "raycluster")):
            queue = {"kind": "volcano", "name": "q"}
            retries = 0 if shape == "raycluster" else 1
            job = make_job(f"a{number}", nodes=2, retries=retries, kubernetes={"shape": shape, "queue": queue})
            target.dry_run(job, target.render(job))
            job_id = target.submit(job, target.render(job))
            assert list(target.logs(job_id, tmp_path, follow=True)) == ["x"]
            target.cancel(job_id, tmp_path)
    assert server.asked <= allowed
    assert {("batch", "jobs", "create"), ("", "pods", "watch"), ("", "pods/log", "get")} <= server.asked


@pytest.mark.parametrize("path", sorted(K8S.rglob("*.yaml")), ids=lambda p: p.name)
def test_yaml_files_are_lint_free(path: Path) -> None:
    found = list(linter.run(path.read_text(encoding="utf-8"), YamlLintConfig(RULES)))
    assert not found, found


@pytest.mark.parametrize("path", sorted((K8S / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_examples_fit_the_schemas(path: Path) -> None:
    for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        check(manifest)
