"""The object that carries a job: an Indexed Job or a JobSet."""

from __future__ import annotations

from nemo_rl_like.launch.kubernetes import names
from nemo_rl_like.launch.kubernetes.pod import Manifest, labels, pod_template
from nemo_rl_like.launch.target import Job

CONTAINER = "node"
BAD_SPEC = 2
"""Exit code of a wrong spec or input: starting again cannot help."""
SAVED = 75
"""Exit code of a run that saved and stopped because it was told to."""


def indexed_job(job: Job) -> Manifest:
    """A `batch/v1` Job with one completion for each host; index 0 is the head, and the job is done when it is.

    A pod that fails is started again, each index at most `retries` times, so that one lost host costs one retry however many pods end
    with it. Ends by eviction, preemption and a lost host do not count (condition DisruptionTarget), nor does exit code 75.
    """
    name = names.object_name(job)
    body = _job_spec(job, head=f"{name}-0.{name}.{job.spec.launch.kubernetes.namespace}.svc")
    body["backoffLimitPerIndex"] = job.spec.launch.retries
    body["maxFailedIndexes"] = 0
    body["ttlSecondsAfterFinished"] = job.spec.launch.kubernetes.keep_s
    if _suspended(job):
        body["suspend"] = True
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(job), "spec": body}


def jobset(job: Job) -> Manifest:
    """A `jobset.x-k8s.io/v1alpha2` JobSet of one Indexed Job: where a pod fails, all of them are started again together.

    A wrong spec and the end of the wall time end the whole set; exit code 75 and disruptions replace pods without counting.
    """
    name = names.object_name(job)
    body = _job_spec(job, head=f"{name}-{CONTAINER}-0-0.{name}.{job.spec.launch.kubernetes.namespace}.svc")
    body["backoffLimit"] = 0
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": job.spec.launch.retries, "rules": [final]},
        "ttlSecondsAfterFinished": job.spec.launch.kubernetes.keep_s,
        "replicatedJobs": [
            {"name": CONTAINER, "replicas": 1, "template": {"metadata": {"labels": labels(job)}, "spec": body}}
        ],
    }
    if _suspended(job):
        spec["suspend"] = True
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata(job), "spec": spec}


def metadata(job: Job) -> Manifest:
    """Name, namespace, labels and annotations of an object that carries a job."""
    spec = job.spec.launch.kubernetes
    queue: dict[str, str] = {}
    if spec.queue is not None and spec.queue.kind == "kueue":
        queue = {"kueue.x-k8s.io/queue-name": spec.queue.name}
    elif spec.queue is not None and spec.queue.kind == "kai":
        queue = {"kai.scheduler/queue": spec.queue.name}
    return {
        "name": names.object_name(job),
        "namespace": spec.namespace,
        "labels": {**labels(job), **queue},
        **({"annotations": dict(spec.annotations)} if spec.annotations else {}),
    }


def _suspended(job: Job) -> bool:
    """Whether the job waits for Kueue to let it run: made so here too, it never runs past a Kueue that is not there."""
    queue = job.spec.launch.kubernetes.queue
    return queue is not None and queue.kind == "kueue"


def _job_spec(job: Job, head: str) -> Manifest:
    launch = job.spec.launch
    template = pod_template(job, CONTAINER, {"NRL_HEAD_HOST": head})
    if launch.kubernetes.shape == "job":
        template["spec"]["subdomain"] = names.object_name(job)
    body: Manifest = {
        "completionMode": "Indexed",
        "completions": launch.nodes,
        "parallelism": launch.nodes,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": template,
    }
    if launch.time_limit_min is not None:
        body["activeDeadlineSeconds"] = active_deadline_s(job)
    return body


def active_deadline_s(job: Job) -> int:
    """When the pods are told to end, in seconds: they save in what is left of the wall time."""
    launch = job.spec.launch
    assert launch.time_limit_min is not None
    return int(launch.time_limit_min * 60 - launch.save_before_end_s)


def _failure_rules() -> list[Manifest]:
    def exits(action: str, code: int) -> Manifest:
        return {
            "action": action,
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [code]},
        }

    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [exits("FailJob", BAD_SPEC), exits("Ignore", SAVED), disrupted]
