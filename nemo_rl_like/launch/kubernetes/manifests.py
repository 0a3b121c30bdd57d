"""All objects of a job, and their YAML."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from nemo_rl_like.launch.kubernetes import names
from nemo_rl_like.launch.kubernetes.pod import Manifest, has_token, labels, scheduler, selector
from nemo_rl_like.launch.kubernetes.ray import job_in_cluster, ray_cluster, ray_job
from nemo_rl_like.launch.kubernetes.shapes import indexed_job, jobset
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.loader import resolved_yaml


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not plainly one: YAML 1.1, YAML 1.2 and Go's parser differ on `1e3`, `0o7`, `on` and `1_0`."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"])


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    tag = "tag:yaml.org,2002:str"
    if "\n" in value and _fits_a_block(value):
        return dumper.represent_scalar(tag, value, style="|")
    plain = (
        value.isascii() and value[:1].isalpha() and value.replace("-", "").replace("/", "").replace(".", "").isalnum()
    )
    if plain and value.lower() not in _WORDS and not value.endswith(("-", ".")):
        return dumper.represent_scalar(tag, value)
    return dumper.represent_scalar(tag, value, style='"')


def _fits_a_block(value: str) -> bool:
    """Whether a literal block holds the text as it is: printable ASCII in lines, no blank at a line's end or at the start."""
    lines = value.split("\n")
    return all(line.isascii() and line.isprintable() and line == line.rstrip() for line in lines) and lines[0][
        :1
    ] not in ("", " ")


_Dumper.add_representer(str, _text)


def to_yaml(objects: Sequence[Manifest]) -> str:
    """Several objects in one file."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=10_000)


def main_objects(job: Job) -> list[Manifest]:
    """What carries the job, in the order of creation; the first owns everything else."""
    match job.spec.launch.kubernetes.shape:
        case "job":
            return [indexed_job(job)]
        case "jobset":
            return [jobset(job)]
        case "rayjob":
            return [ray_job(job)]
        case "raycluster":
            return [ray_cluster(job), job_in_cluster(job)]


def helper_objects(job: Job) -> list[Manifest]:
    """What the pods need beside: the spec, names of hosts, a group that Volcano places as one. No secrets."""
    objects = [_spec_map(job)]
    if job.spec.launch.kubernetes.shape == "job":
        objects.append(_service(job))
    if scheduler(job) == "volcano":
        objects.append(_pod_group(job))
    return objects


def token_object(job: Job, token: str) -> Manifest | None:
    """The Secret with the token of the job's Ray ports; None where no host needs one. Never written to a file."""
    if not has_token(job):
        return None
    name = names.token_secret(names.object_name(job))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, name),
        "type": "Opaque",
        "immutable": True,
        "stringData": {names.TOKEN_KEY: token},
    }


def _metadata(job: Job, name: str) -> Manifest:
    return {"name": name, "namespace": job.spec.launch.kubernetes.namespace, "labels": labels(job)}


def _spec_map(job: Job) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, names.object_name(job)),
        "immutable": True,
        "data": {"spec.yaml": resolved_yaml(job.spec)},
    }


def _service(job: Job) -> Manifest:
    """Gives each pod a DNS name, before it is ready too: hosts find the head while all of them start."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, names.object_name(job)),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector(job)},
    }


def _pod_group(job: Job) -> Manifest:
    launch = job.spec.launch
    assert launch.kubernetes.queue is not None
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": _metadata(job, names.object_name(job)),
        "spec": {"minMember": launch.nodes, "queue": launch.kubernetes.queue.name},
    }
