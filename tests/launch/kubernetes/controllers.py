"""Doubles of what acts on a cluster's objects: the Job, JobSet and KubeRay controllers, and the kubelet that runs pods by a script.

They follow the documents of Kubernetes 1.33 (Jobs: pod failure policy, backoff limit per index, success policy), JobSet v1alpha2 and KubeRay 1.6 as
far as jobs of ours use them; what ours do not use is not here.
"""

from __future__ import annotations

import asyncio
import copy
import re
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tests.launch.kubernetes.api_server import ApiServer

Manifest = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pod does: it writes lines, then ends with a code, or is evicted, or its host is lost, or it runs until it is deleted."""

    lines: Sequence[str] = ()
    end: int | Literal["evicted", "lost", "runs"] = 0
    stays_s: float = 0.0
    """Seconds between the first line and the others."""


@dataclass
class Script:
    """Outcomes of pods by completion index, one for each start; what is not said is: done at once."""

    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    used: Counter[int] = field(default_factory=Counter)

    def next(self, index: int) -> Outcome:
        """What the next pod of an index does: the last outcome stays."""
        listed = self.outcomes.get(index) or [Outcome(end="runs") if index else Outcome()]
        at = min(self.used[index], len(listed) - 1)
        self.used[index] += 1
        return listed[at]


def expanded(
    env: list[Manifest], secrets: Callable[[str, str], str] = lambda name, key: f"<{name}/{key}>"
) -> dict[str, str]:
    """Variables of a container as the kubelet makes them: `$(NAME)` of an earlier one is replaced, `$$` is `$`."""
    made: dict[str, str] = {}

    def piece(found: re.Match[str]) -> str:
        if found.group(0) == "$$":
            return "$"
        return made.get(found.group(1), found.group(0))

    for variable in env:
        if "valueFrom" in variable:
            at = variable["valueFrom"]["secretKeyRef"]
            made[variable["name"]] = secrets(at["name"], at["key"])
        else:
            made[variable["name"]] = re.sub(r"\$\$|\$\(([^()]*)\)", piece, variable["value"])
    return made


def condition(kind: str, reason: str, message: str = "") -> Manifest:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Kubelet:
    """Runs pods by the script."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.environments: dict[str, dict[str, str]] = {}
        self.told: dict[str, asyncio.Event] = {}
        self.pull_s = 0.01
        """Seconds from a pod's creation to its start."""

    async def run(self, pod: Manifest, outcome: Outcome) -> None:
        """From Pending to its end; a pod whose volumes are not there stays Pending."""
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        missing = [m for m in self._needs(pod) if (m[0], namespace, m[1]) not in self.server.objects]
        if missing:
            self.server.set_status(
                "pods", namespace, name, {"phase": "Pending", "reason": "FailedMount", "message": str(missing)}
            )
            return
        container = pod["spec"]["containers"][0]
        self.environments[name] = expanded(container.get("env", []))
        told = self.told[pod["metadata"]["uid"]] = asyncio.Event()
        self.server.set_status("pods", namespace, name, {"phase": "Pending"})
        await asyncio.sleep(self.pull_s)
        pod["spec"]["nodeName"] = f"host-{pod['metadata']['labels'].get(INDEX, 0)}"
        self.server.set_status("pods", namespace, name, {"phase": "Running"})
        for number, line in enumerate(outcome.lines):
            self.server.log_line(name, line)
            await asyncio.sleep(outcome.stays_s if number == 0 else 0.0)
        if outcome.end == "runs":
            await told.wait()
            self._end(pod, 75, [])
        elif isinstance(outcome.end, int):
            self._end(pod, outcome.end, [])
        else:
            reason = {"evicted": "EvictionByEvictionAPI", "lost": "DeletionByPodGC"}[outcome.end]
            self._end(pod, 137, [condition("DisruptionTarget", reason)])

    def tell(self, pod: Manifest) -> None:
        """SIGTERM."""
        if event := self.told.get(pod["metadata"]["uid"]):
            event.set()

    def _end(self, pod: Manifest, code: int, conditions: list[Manifest]) -> None:
        ended = {"name": pod["spec"]["containers"][0]["name"], "state": {"terminated": {"exitCode": code}}}
        status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [ended], "conditions": conditions}
        self.server.set_status("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], status)

    @staticmethod
    def _needs(pod: Manifest) -> list[tuple[str, str]]:
        volumes = pod["spec"].get("volumes", [])
        maps = [("configmaps", v["configMap"]["name"]) for v in volumes if "configMap" in v]
        return maps + [("secrets", v["secret"]["secretName"]) for v in volumes if "secret" in v]


class JobController:
    """Plays Kubernetes' Job controller for Indexed Jobs."""

    def __init__(self, server: ApiServer, kubelet: Kubelet, script: Script) -> None:
        self.server, self.kubelet, self.script = server, kubelet, script
        self.counted: dict[str, Counter[int]] = {}
        self.seen: set[str] = set()

    def sync(self, job: Manifest) -> None:
        """Bring pods and status of a job to what its spec asks."""
        if self._finished(job) or "deletionTimestamp" in job["metadata"]:
            return
        if job["spec"].get("suspend"):
            self._set(job, {"conditions": [condition("Suspended", "JobSuspended")]})
            return
        pods = self._pods(job)
        verdict = self._judge(job, pods)
        if verdict is not None:
            self._finish(job, pods, verdict)
            return
        for index in range(job["spec"]["completions"]):
            mine = [p for p in pods if int(p["metadata"]["labels"][INDEX]) == index]
            if not [p for p in mine if p["status"].get("phase") in (None, "Pending", "Running", "Succeeded")]:
                self._start(job, index)
        active = [p for p in self._pods(job) if p["status"].get("phase") in (None, "Pending", "Running")]
        self._set(job, {"active": len(active), "conditions": []})

    def _judge(self, job: Manifest, pods: list[Manifest]) -> Manifest | None:
        """The condition that ends the job, or None; each failed pod is counted once."""
        spec, counted = job["spec"], self.counted.setdefault(job["metadata"]["uid"], Counter())
        for pod in pods:
            uid, index = pod["metadata"]["uid"], int(pod["metadata"]["labels"][INDEX])
            if pod["status"].get("phase") == "Succeeded" and str(index) in {
                r["succeededIndexes"] for r in spec.get("successPolicy", {}).get("rules", [])
            }:
                return condition("Complete", "SuccessPolicy")
            if pod["status"].get("phase") != "Failed" or uid in self.seen:
                continue
            self.seen.add(uid)
            action = _action(spec.get("podFailurePolicy", {}).get("rules", []), pod)
            if action == "FailJob":
                return condition("Failed", "PodFailurePolicy", f"pod {pod['metadata']['name']} matched a FailJob rule")
            counted[index] += action == "Count"
        if "backoffLimitPerIndex" in spec:
            over = [i for i, n in counted.items() if n > spec["backoffLimitPerIndex"]]
            if len(over) > spec["maxFailedIndexes"]:
                return condition(
                    "Failed",
                    "MaxFailedIndexesExceeded",
                    "Job has exceeded the specified maximal number of failed indexes",
                )
        elif counted.total() > spec.get("backoffLimit", 6):
            return condition("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        return None

    def _finish(self, job: Manifest, pods: list[Manifest], verdict: Manifest) -> None:
        self._set(job, {"active": 0, "conditions": [verdict]})
        for pod in pods:
            self.kubelet.tell(pod)

    def _start(self, job: Manifest, index: int) -> None:
        name, template = f"{job['metadata']['name']}-{index}-{uuid.uuid4().hex[:5]}", job["spec"]["template"]
        labels = {**template["metadata"].get("labels", {}), INDEX: str(index), "job-name": job["metadata"]["name"]}
        meta = {"name": name, "namespace": job["metadata"]["namespace"], "labels": labels}
        meta["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
        ]
        pod = self.server.put(
            "pods", {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": copy.deepcopy(template["spec"])}
        )
        self.server.spawn(self.kubelet.run(pod, self.script.next(index)))

    def _pods(self, job: Manifest) -> list[Manifest]:
        return [p for p in self.server.of("pods", job["metadata"]["namespace"]) if owned(p, job)]

    def _finished(self, job: Manifest) -> bool:
        return bool({"Complete", "Failed"} & {c["type"] for c in job["status"].get("conditions", [])})

    def _set(self, job: Manifest, status: Manifest) -> None:
        if job["status"] != status:
            self.server.set_status("jobs", job["metadata"]["namespace"], job["metadata"]["name"], status)


def owned(thing: Manifest, owner: Manifest) -> bool:
    """Whether an object belongs to another."""
    return owner["metadata"]["uid"] in [r["uid"] for r in thing["metadata"].get("ownerReferences", [])]


def _action(rules: list[Manifest], pod: Manifest) -> str:
    """The first rule that a failed pod matches."""
    status = pod["status"]
    codes = {c["name"]: c["state"]["terminated"]["exitCode"] for c in status["containerStatuses"]}
    conditions = {(c["type"], c["status"]) for c in status.get("conditions", [])}
    for rule in rules:
        exits = rule.get("onExitCodes")
        if exits is not None and codes.get(exits["containerName"]) in exits["values"] and exits["operator"] == "In":
            return str(rule["action"])
        if conditions & {(c["type"], c["status"]) for c in rule.get("onPodConditions", [])}:
            return str(rule["action"])
    return "Count"


class JobSetController:
    """Plays JobSet's controller: child jobs, restarts of the whole set, its end."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.restarts: Counter[str] = Counter()

    def sync(self, whole: Manifest) -> None:
        """Make the child jobs, or follow their end."""
        meta, spec = whole["metadata"], whole["spec"]
        if whole["status"].get("conditions") or "deletionTimestamp" in meta:
            return
        if spec.get("suspend"):
            self._end(whole, condition("Suspended", "SuspendedJobs"))
            return
        jobs = [j for j in self.server.of("jobs", meta["namespace"]) if owned(j, whole)]
        if not jobs:
            self._start(whole)
            return
        conditions = {c["type"]: c for j in jobs for c in j["status"].get("conditions", [])}
        if "Complete" in conditions:
            self._end(whole, condition("Completed", "AllJobsCompleted"))
        elif "Failed" in conditions:
            self._failed(whole, jobs, conditions["Failed"]["reason"])

    def _failed(self, whole: Manifest, jobs: list[Manifest], reason: str) -> None:
        policy, uid = whole["spec"]["failurePolicy"], whole["metadata"]["uid"]
        final = any(r["action"] == "FailJobSet" and reason in r["onJobFailureReasons"] for r in policy["rules"])
        if final or self.restarts[uid] >= policy["maxRestarts"]:
            self._end(whole, condition("Failed", "FailedJobs" if final else "ReachedMaxRestarts", reason))
            return
        self.restarts[uid] += 1
        for job in jobs:
            self.server.remove("jobs", job["metadata"]["namespace"], job["metadata"]["name"])
        self._start(whole)

    def _start(self, whole: Manifest) -> None:
        for part in whole["spec"]["replicatedJobs"]:
            meta = {
                "name": f"{whole['metadata']['name']}-{part['name']}-0",
                "namespace": whole["metadata"]["namespace"],
                "ownerReferences": [
                    {
                        "apiVersion": whole["apiVersion"],
                        "kind": "JobSet",
                        "name": whole["metadata"]["name"],
                        "uid": whole["metadata"]["uid"],
                    }
                ],
            }
            self.server.put(
                "jobs",
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": meta,
                    "spec": copy.deepcopy(part["template"]["spec"]),
                },
            )

    def _end(self, whole: Manifest, how: Manifest) -> None:
        meta = whole["metadata"]
        self.server.set_status("jobsets", meta["namespace"], meta["name"], {"conditions": [how]})


class RayController:
    """Plays KubeRay: refuses what its validation refuses, runs the submitter's pod, tells the job's state."""

    def __init__(self, server: ApiServer, kubelet: Kubelet, script: Script) -> None:
        self.server, self.kubelet, self.script = server, kubelet, script
        self.retries: Counter[str] = Counter()

    def sync(self, job: Manifest) -> None:
        """Start the driver, or follow its end."""
        meta, spec = job["metadata"], job["spec"]
        deployment = job["status"].get("jobDeploymentStatus")
        if deployment in ("Complete", "Failed", "ValidationFailed") or "deletionTimestamp" in meta:
            return
        if problem := self.problem(job):
            self._set(job, "ValidationFailed", reason="ValidationFailed", message=problem)
        elif spec.get("suspend"):
            self._set(job, "Suspended")
        elif deployment is None:
            self._set(job, "Initializing")
            self._start(job)
        else:
            self._follow(job)

    def problem(self, job: Manifest) -> str | None:
        """What KubeRay's own validation says."""
        spec = job["spec"]
        cluster, selected = spec.get("rayClusterSpec"), spec.get("clusterSelector")
        if len(job["metadata"]["name"]) > 47:
            return "RayJob name should be no more than 47 characters"
        if spec.get("suspend") and (selected or not spec["shutdownAfterJobFinishes"]):
            return "a RayJob that stays, or is in another's cluster, is not allowed to be suspended"
        if cluster is None and not selected:
            return "one of RayClusterSpec or ClusterSelector must be set"
        if not spec["shutdownAfterJobFinishes"] and spec.get("ttlSecondsAfterFinished", 0) > 0:
            return "a RayJob with shutdownAfterJobFinishes set to false cannot have TTLSecondsAfterFinished"
        if (
            selected
            and ("rayclusters", job["metadata"]["namespace"], selected["ray.io/cluster"]) not in self.server.objects
        ):
            return f"no RayCluster {selected['ray.io/cluster']}"
        if cluster is not None and cluster["authOptions"]["mode"] == "token" and not cluster.get("rayVersion"):
            return "authOptions.mode is 'token' but RayVersion was not specified"
        return None

    def _start(self, job: Manifest) -> None:
        template, meta = job["spec"]["submitterPodTemplate"], job["metadata"]
        owner = {"apiVersion": job["apiVersion"], "kind": "RayJob", "name": meta["name"], "uid": meta["uid"]}
        pod_meta = {
            "name": f"{meta['name']}-{uuid.uuid4().hex[:5]}",
            "namespace": meta["namespace"],
            "ownerReferences": [owner],
        }
        pod_meta["labels"] = dict(template["metadata"]["labels"])
        pod = self.server.put(
            "pods", {"apiVersion": "v1", "kind": "Pod", "metadata": pod_meta, "spec": copy.deepcopy(template["spec"])}
        )
        self.server.spawn(self.kubelet.run(pod, self.script.next(0)))

    def _follow(self, job: Manifest) -> None:
        pods = [p for p in self.server.of("pods", job["metadata"]["namespace"]) if owned(p, job)]
        phase = pods[-1]["status"].get("phase")
        if phase == "Running":
            self._set(job, "Running", result="RUNNING")
        elif phase == "Succeeded":
            self._set(job, "Complete", result="SUCCEEDED")
        elif phase == "Failed" and self.retries[job["metadata"]["uid"]] < job["spec"].get("backoffLimit", 0):
            self.retries[job["metadata"]["uid"]] += 1
            self._set(job, "Retrying", result="FAILED")
            self._start(job)
        elif phase == "Failed":
            self._set(
                job,
                "Failed",
                result="FAILED",
                reason="AppFailed",
                message="Job entrypoint command failed with exit code 1",
            )

    def _set(self, job: Manifest, deployment: str, *, result: str = "", reason: str = "", message: str = "") -> None:
        status = {"jobDeploymentStatus": deployment, "jobStatus": result, "reason": reason, "message": message}
        if job["status"] != status:
            self.server.set_status("rayjobs", job["metadata"]["namespace"], job["metadata"]["name"], status)
