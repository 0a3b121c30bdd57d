"""How far a job is, from its object and its pods."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_like.launch.kubernetes.pod import Manifest
from nemo_rl_like.launch.target import JobStatus, State

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
_RAY_STATES: dict[str, State] = {
    "": "queued",
    "New": "queued",
    "Initializing": "queued",
    "Waiting": "queued",
    "Suspending": "queued",
    "Suspended": "queued",
    "Retrying": "queued",
    "Running": "running",
    "Complete": "done",
    "Failed": "failed",
    "ValidationFailed": "failed",
}
_FINAL: dict[str, State] = {"Complete": "done", "Completed": "done", "Failed": "failed"}
"""Conditions that end a Job (`Complete`) or a JobSet (`Completed`)."""


def status_of(carrier: Manifest, pods: Sequence[Manifest]) -> JobStatus:
    """The state of a Job, JobSet or RayJob.

    Args:
        carrier: the object that carries the job.
        pods: pods of its driver, the oldest first.
    """
    code = _exit_code(pods[-1]) if pods else None
    if "deletionTimestamp" in carrier["metadata"]:
        return JobStatus("cancelled", "being deleted", code)
    if carrier["kind"] == "RayJob":
        return _ray_status(carrier, pods)
    conditions = _conditions(carrier)
    for kind, state in _FINAL.items():
        if kind in conditions:
            return JobStatus(state, _told(kind, conditions[kind]), code)
    if "Suspended" in conditions:
        return JobStatus("queued", _told("Suspended", conditions["Suspended"]))
    if not pods:
        return JobStatus("queued", "no pod yet")
    if pods[-1].get("status", {}).get("phase") == "Running":
        return JobStatus(
            "running", f"pod {pods[-1]['metadata']['name']} runs on {pods[-1]['spec'].get('nodeName', '?')}"
        )
    return JobStatus("queued", f"pod {pods[-1]['metadata']['name']} waits: {_why_waiting(pods[-1])}")


def ended(status: JobStatus) -> bool:
    """Whether nothing more will run."""
    return status.state in ("done", "failed", "cancelled", "unknown")


def started(pod: Manifest) -> bool:
    """Whether a pod has a log."""
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def _ray_status(carrier: Manifest, pods: Sequence[Manifest]) -> JobStatus:
    status = carrier.get("status", {})
    deployment, result = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    state: State = _RAY_STATES.get(deployment, "unknown")
    if state == "done" and result not in ("", "SUCCEEDED"):
        state = "failed"
    words = [deployment or "not seen by KubeRay yet", result, status.get("reason", ""), status.get("message", "")]
    if state == "queued" and pods:
        words.append(f"pod {pods[-1]['metadata']['name']}: {_why_waiting(pods[-1])}")
    return JobStatus(state, ", ".join(w for w in words if w), 0 if state == "done" else None)


def _conditions(carrier: Manifest) -> dict[str, Manifest]:
    return {c["type"]: c for c in carrier.get("status", {}).get("conditions") or [] if c["status"] == "True"}


def _told(kind: str, condition: Manifest) -> str:
    return ", ".join(w for w in (kind, condition.get("reason", ""), condition.get("message", "")) if w)


def _exit_code(pod: Manifest) -> int | None:
    for container in pod.get("status", {}).get("containerStatuses") or []:
        ended_as = container.get("state", {}).get("terminated")
        if ended_as is not None:
            return int(ended_as["exitCode"])
    return None


def _why_waiting(pod: Manifest) -> str:
    """The scheduler's or the kubelet's reason."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        waits = container.get("state", {}).get("waiting")
        if waits is not None:
            return ", ".join(w for w in (waits.get("reason", ""), waits.get("message", "")) if w)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return ", ".join(w for w in (condition.get("reason", ""), condition.get("message", "")) if w)
    return ", ".join(w for w in (status.get("phase", ""), status.get("reason", ""), status.get("message", "")) if w)
