"""The objects of KubeRay that carry a job: a RayJob, or a RayCluster that stays and a RayJob in it. `ray.io/v1`, KubeRay 1.6 or newer."""

from __future__ import annotations

import shlex

from nemo_rl_like.launch.kubernetes import names
from nemo_rl_like.launch.kubernetes.pod import (
    Manifest,
    command,
    container_security,
    has_token,
    labels,
    pod_security,
    pod_template,
    scratch_mounts,
    scratch_volumes,
)
from nemo_rl_like.launch.kubernetes.shapes import metadata
from nemo_rl_like.launch.target import Job

RAY_VERSION = "2.60.0"
"""Ray of the image: the one that `pyproject.toml` pins."""
SUBMITTER = "submitter"


def ray_job(job: Job) -> Manifest:
    """A RayJob with a cluster of its own, which ends with it."""
    body: Manifest = {
        **_driver(job),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": job.spec.launch.kubernetes.keep_s,
        "backoffLimit": job.spec.launch.retries,
        "rayClusterSpec": _cluster(job),
    }
    if (queue := job.spec.launch.kubernetes.queue) is not None and queue.kind == "kueue":
        body["suspend"] = True
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(job), "spec": body}


def ray_cluster(job: Job) -> Manifest:
    """A RayCluster that stays when the job in it has ended, until `nrl cancel`."""
    body = _cluster(job)
    if (queue := job.spec.launch.kubernetes.queue) is not None and queue.kind == "kueue":
        body["suspend"] = True
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": _metadata(job), "spec": body}


def job_in_cluster(job: Job) -> Manifest:
    """The RayJob that runs the driver in `ray_cluster(job)`."""
    name = names.object_name(job)
    body = {**_driver(job), "shutdownAfterJobFinishes": False, "clusterSelector": {"ray.io/cluster": name}}
    plain = {"name": name, "namespace": job.spec.launch.kubernetes.namespace, "labels": labels(job)}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": plain, "spec": body}


def _metadata(job: Job) -> Manifest:
    written = metadata(job)
    queue = job.spec.launch.kubernetes.queue
    if queue is not None and queue.kind == "volcano":
        written["labels"] |= {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": queue.name}
    return written


def _driver(job: Job) -> Manifest:
    """What the submitter asks Ray to start on the head, and the submitter's pod, whose log is the driver's."""
    return {
        "entrypoint": shlex.join(command(job)),
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": _submitter(job),
    }


def _submitter(job: Job) -> Manifest:
    spec = job.spec.launch.kubernetes
    amounts = {"cpu": "500m", "memory": "1024Mi"}
    return {
        "metadata": {"labels": {**labels(job), "app.kubernetes.io/component": SUBMITTER}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(job),
            **({"imagePullSecrets": [{"name": n} for n in spec.image_pull_secrets]} if spec.image_pull_secrets else {}),
            "containers": [
                {
                    "name": SUBMITTER,
                    "image": job.spec.launch.image,
                    "env": [{"name": "HOME", "value": names.HOME}],
                    "resources": {"requests": dict(amounts), "limits": dict(amounts)},
                    "securityContext": container_security(job, pins_memory=False),
                    "volumeMounts": scratch_mounts(),
                }
            ],
            "volumes": scratch_volumes(job),
        },
    }


def _cluster(job: Job) -> Manifest:
    """A head that carries the first host's devices, and a group with the other hosts."""
    others = job.spec.launch.nodes - 1
    body: Manifest = {
        "rayVersion": RAY_VERSION,
        "authOptions": _authentication(job),
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {"rayStartParams": _start_parameters(job), "template": _ray_pod(job, "ray-head")},
    }
    if others:
        body["workerGroupSpecs"] = [
            {
                "groupName": "hosts",
                "replicas": others,
                "minReplicas": others,
                "maxReplicas": others,
                "rayStartParams": _start_parameters(job),
                "template": _ray_pod(job, "ray-worker"),
            }
        ]
    return body


def _authentication(job: Job) -> Manifest:
    if not has_token(job):
        return {"mode": "disabled"}
    return {"mode": "token", "secretName": names.token_secret(names.object_name(job))}


def _start_parameters(job: Job) -> dict[str, str]:
    spec = job.spec
    parameters = {"object-store-memory": str(names.mebibytes(spec.cluster.object_store_gib) << 20)}
    if spec.launch.accelerator == "cpu":
        parameters["num-cpus"] = str(spec.launch.devices_per_node)
    else:
        parameters["num-gpus"] = str(spec.launch.devices_per_node)
    return parameters


def _ray_pod(job: Job, container: str) -> Manifest:
    """A pod whose command is KubeRay's `ray start`."""
    template = pod_template(job, container, {})
    del template["spec"]["containers"][0]["command"]
    return template
