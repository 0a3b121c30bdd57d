"""The pod of a job: what it runs, sees, takes of a host, and may not do."""

from __future__ import annotations

import math
from typing import Any

from nemo_rl_like.launch.kubernetes import names
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.kubernetes import TolerationSpec

Manifest = dict[str, Any]
"""An object of Kubernetes, or part of one, as it is written in YAML."""

HOST = "host"
STOP_MARGIN_S = 60
"""Seconds that a pod has beside `save_before_end_s` before it is killed: Ray's end, and the last files."""


def command(job: Job) -> list[str]:
    """What each host of the job starts."""
    return ["nrl", "node", names.SPEC_FILE, *([] if job.until is None else ["--until", job.until])]


def labels(job: Job) -> dict[str, str]:
    """Labels of every object of the job."""
    return {
        **job.spec.launch.kubernetes.labels,
        "app.kubernetes.io/name": "nrl",
        "app.kubernetes.io/instance": names.object_name(job),
        "app.kubernetes.io/managed-by": "nrl",
    }


def selector(job: Job) -> dict[str, str]:
    """Labels that the pods of the job's hosts have, and no others."""
    instance = {"app.kubernetes.io/name": "nrl", "app.kubernetes.io/instance": names.object_name(job)}
    return {**instance, "app.kubernetes.io/component": HOST}


def has_token(job: Job) -> bool:
    """Whether hosts need a token from the submission; a run on one host makes its own."""
    launch = job.spec.launch
    return launch.auth == "token" and (launch.nodes > 1 or launch.kubernetes.shape in ("rayjob", "raycluster"))


def reserved_variables(job: Job) -> dict[str, str]:
    """Variables that the pods get whatever the spec says."""
    variables = {"HOME": names.HOME, "RAY_AUTH_MODE": job.spec.launch.auth}
    if has_token(job):
        variables["RAY_AUTH_TOKEN_PATH"] = f"{names.TOKEN_FOLDER}/{names.TOKEN_KEY}"
    return variables


def pod_template(job: Job, container: str, variables: dict[str, str]) -> Manifest:
    """The template of a pod that carries one host's share of the job.

    Args:
        container: name of its one container.
        variables: further environment variables, such as where the head is.
    """
    spec = job.spec.launch.kubernetes
    return {
        "metadata": {
            "labels": {**labels(job), **selector(job), **_queue_labels(job)},
            "annotations": _annotations(job),
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": math.ceil(job.spec.launch.save_before_end_s) + STOP_MARGIN_S,
            "securityContext": pod_security(job),
            **_scheduling(job),
            **({"imagePullSecrets": [{"name": n} for n in spec.image_pull_secrets]} if spec.image_pull_secrets else {}),
            "containers": [_container(job, container, variables)],
            "volumes": _volumes(job),
        },
    }


def pod_security(job: Job) -> Manifest:
    """What Kubernetes' `restricted` standard asks of a pod."""
    spec = job.spec.launch.kubernetes
    return {
        "runAsNonRoot": True,
        "runAsUser": spec.user,
        "runAsGroup": spec.group,
        "fsGroup": spec.group,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(job: Job, *, pins_memory: bool) -> Manifest:
    """What the same standard asks of a container; `pins_memory` adds IPC_LOCK, which it does not allow."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": job.spec.launch.kubernetes.read_only_root,
        "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if pins_memory else {})},
    }


def _container(job: Job, name: str, variables: dict[str, str]) -> Manifest:
    return {
        "name": name,
        "image": job.spec.launch.image,
        "command": [names.literal(word) for word in command(job)],
        "env": _environment(job, variables),
        "resources": _resources(job),
        "securityContext": container_security(job, pins_memory=job.spec.launch.kubernetes.rdma is not None),
        "volumeMounts": _mounts(job),
    }


def _environment(job: Job, variables: dict[str, str]) -> list[Manifest]:
    written = {**job.spec.launch.environment, **reserved_variables(job), **variables}
    plain = [{"name": name, "value": names.literal(value)} for name, value in written.items()]
    references = {ref.env: ref.kubernetes for ref in job.spec.secrets.values() if ref.kubernetes is not None}
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": at.secret, "key": at.key}}}
        for name, at in references.items()
    ]


def _resources(job: Job) -> Manifest:
    """Requests equal limits: the pod is of class Guaranteed where CPU and memory are given."""
    launch = job.spec.launch
    amounts: dict[str, str] = {}
    if launch.cpus_per_node is not None:
        amounts["cpu"] = str(launch.cpus_per_node)
    if launch.memory_gib_per_node is not None:
        amounts["memory"] = names.quantity(launch.memory_gib_per_node)
    if launch.accelerator == "gpu":
        amounts[launch.kubernetes.gpu_resource] = str(launch.devices_per_node)
    if launch.kubernetes.rdma is not None:
        amounts[launch.kubernetes.rdma.resource] = str(launch.kubernetes.rdma.count)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _volumes(job: Job) -> list[Manifest]:
    spec, name = job.spec.launch.kubernetes, names.object_name(job)
    volumes: list[Manifest] = [
        {"name": "spec", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": names.quantity(spec.shm_gib)}},
        *scratch_volumes(job),
    ]
    if has_token(job):
        volumes.append({"name": "ray-token", "secret": {"secretName": names.token_secret(name), "defaultMode": 0o440}})
    for index, claim in enumerate(dict.fromkeys(c.claim for c in spec.claims)):
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}})
    return volumes


def _mounts(job: Job) -> list[Manifest]:
    spec = job.spec.launch.kubernetes
    mounts: list[Manifest] = [
        {"name": "spec", "mountPath": names.SPEC_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": names.SHM},
        *scratch_mounts(),
    ]
    if has_token(job):
        mounts.append({"name": "ray-token", "mountPath": names.TOKEN_FOLDER, "readOnly": True})
    claims = list(dict.fromkeys(c.claim for c in spec.claims))
    for claim in spec.claims:
        mount = {"name": f"claim-{claims.index(claim.claim)}", "mountPath": claim.path, "readOnly": claim.read_only}
        mounts.append(mount if claim.sub_path is None else {**mount, "subPath": claim.sub_path})
    return mounts


def scratch_volumes(job: Job) -> list[Manifest]:
    """Folders on the host's disk that end with the pod."""
    size = names.quantity(job.spec.launch.kubernetes.scratch_gib)
    return [{"name": name, "emptyDir": {"sizeLimit": size}} for name in names.SCRATCH]


def scratch_mounts() -> list[Manifest]:
    """Where the container sees them."""
    return [{"name": name, "mountPath": path} for name, path in names.SCRATCH.items()]


def _scheduling(job: Job) -> Manifest:
    spec = job.spec.launch.kubernetes
    given: Manifest = {
        "schedulerName": scheduler(job),
        "priorityClassName": spec.priority_class,
        "serviceAccountName": spec.service_account,
        "runtimeClassName": spec.runtime_class,
        "nodeSelector": spec.node_selector or None,
        "tolerations": [_toleration(t) for t in spec.tolerations] or None,
        "affinity": _together(job) or None,
        "topologySpreadConstraints": _apart(job) or None,
    }
    return {key: value for key, value in given.items() if value is not None}


def scheduler(job: Job) -> str | None:
    """Name of the scheduler that places the pods; None: the cluster's default. KubeRay sets Volcano's itself."""
    queue = job.spec.launch.kubernetes.queue
    if queue is None or queue.kind == "kueue":
        return None
    if queue.kind == "kai":
        return "kai-scheduler"
    return None if job.spec.launch.kubernetes.shape in ("rayjob", "raycluster") else "volcano"


def _toleration(spec: TolerationSpec) -> Manifest:
    taint = {"key": spec.key, "operator": "Exists"} if spec.value is None else _equal(spec.key, spec.value)
    return taint if spec.effect is None else {**taint, "effect": spec.effect}


def _equal(key: str, value: str) -> Manifest:
    return {"key": key, "operator": "Equal", "value": value}


def _together(job: Job) -> Manifest:
    """Affinity of the job's pods to each other; Kubernetes lets the first one of a required affinity in."""
    required: list[Manifest] = []
    preferred: list[Manifest] = []
    for wish in job.spec.launch.kubernetes.topology:
        if wish.place == "together":
            term = {"topologyKey": wish.key, "labelSelector": {"matchLabels": selector(job)}}
            if wish.required:
                required.append(term)
            else:
                preferred.append({"weight": 100, "podAffinityTerm": term})
    terms: Manifest = {}
    if required:
        terms["requiredDuringSchedulingIgnoredDuringExecution"] = required
    if preferred:
        terms["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    return {"podAffinity": terms} if terms else {}


def _apart(job: Job) -> list[Manifest]:
    return [
        {
            "maxSkew": 1,
            "topologyKey": wish.key,
            "whenUnsatisfiable": "DoNotSchedule" if wish.required else "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(job)},
        }
        for wish in job.spec.launch.kubernetes.topology
        if wish.place == "apart"
    ]


def _annotations(job: Job) -> dict[str, str]:
    spec = job.spec.launch.kubernetes
    if scheduler(job) != "volcano":
        return dict(spec.annotations)
    return {**spec.annotations, "scheduling.k8s.io/group-name": names.object_name(job)}


def _queue_labels(job: Job) -> dict[str, str]:
    """KAI reads a pod's queue from its own label."""
    queue = job.spec.launch.kubernetes.queue
    return {"kai.scheduler/queue": queue.name} if queue is not None and queue.kind == "kai" else {}
