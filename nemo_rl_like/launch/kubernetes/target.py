"""Kubernetes as a target of `nrl submit`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch.kubernetes import manifests, names
from nemo_rl_like.launch.kubernetes.api import BY_KIND, Cluster, Kind, Missing
from nemo_rl_like.launch.kubernetes.following import WATCH_S, Following, driver_pods
from nemo_rl_like.launch.kubernetes.pod import Manifest, has_token
from nemo_rl_like.launch.kubernetes.problems import RAY_SHAPES, problems
from nemo_rl_like.launch.kubernetes.state import INDEX_LABEL, status_of
from nemo_rl_like.launch.target import Job, JobStatus, Rendered

FILE = "kubernetes.yaml"
CARRIERS = {"job": "Job", "jobset": "JobSet", "rayjob": "RayJob", "raycluster": "RayJob"}
"""Kind of the object whose state is the job's, by shape."""


@dataclass(frozen=True, slots=True)
class _Id:
    """Where a job is: what its id says."""

    shape: str
    namespace: str
    name: str
    context: str | None

    def __str__(self) -> str:
        return f"{self.shape}:{self.namespace}/{self.name}" + ("" if self.context is None else f"@{self.context}")

    @property
    def carrier(self) -> Kind:
        return BY_KIND[CARRIERS[self.shape]]

    @property
    def selector(self) -> str:
        """Labels of the pods whose log is the driver's."""
        own = f"app.kubernetes.io/name=nrl,app.kubernetes.io/instance={self.name}"
        if self.shape in RAY_SHAPES:
            return f"{own},app.kubernetes.io/component=submitter"
        return f"{own},app.kubernetes.io/component=host,{INDEX_LABEL}=0"


class KubernetesTarget:
    """Jobs on a Kubernetes cluster (`launch.kubernetes`), through the official Python client.

    Args:
        connect_s: longest wait for a connection to the API server, in seconds.
        read_s: longest wait for an answer, in seconds.
        watch_s: longest wait for a change before `logs` reads the job's state again, in seconds.
    """

    name = "kubernetes"

    def __init__(self, *, connect_s: float = 10.0, read_s: float = 60.0, watch_s: int = WATCH_S) -> None:
        self._connect_s, self._read_s, self._watch_s = connect_s, read_s, watch_s

    def problems(self, job: Job) -> list[str]:
        """Fields that Kubernetes or the shape cannot honour, each with value, limit and fix; needs no cluster."""
        return problems(job)

    def render(self, job: Job) -> Rendered:
        """The job's objects but for the token of its Ray ports, which only the cluster ever holds."""
        head = ""
        if has_token(job):
            secret = names.token_secret(names.object_name(job))
            head = f"# The token of Ray's ports is not in this file: `nrl submit` makes the Secret {secret} (key {names.TOKEN_KEY}) with a random one.\n"
        objects = [*manifests.helper_objects(job), *manifests.main_objects(job)]
        return Rendered({FILE: head + manifests.to_yaml(objects)}, ("kubectl", "create", "-f", FILE))

    def dry_run(self, job: Job, rendered: Rendered) -> None:
        """Let the API server check every object, unknown fields included. Raises SubmitError with its words."""
        cluster = self._cluster(job.spec.launch.kubernetes.context)
        for manifest in _objects(job, "0" * 64):
            cluster.create(manifest, dry_run=True)

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Create the objects, those that pods need first; the job owns them. Of a submission that is refused nothing stays.

        Raises:
            SubmitError: the API server refuses one, or cannot be reached.
        """
        spec = job.spec.launch.kubernetes
        cluster = self._cluster(spec.context)
        made: list[Manifest] = []
        try:
            for manifest in _objects(job, secrets.token_hex(32)):
                made.append(manifest | cluster.create(manifest))
            owner = next(m for m in made if m["kind"] == manifests.main_objects(job)[0]["kind"])
            for manifest in made:
                if manifest is not owner:
                    cluster.own(manifest, owner)
        except BaseException:
            for manifest in reversed(made):
                cluster.delete(BY_KIND[manifest["kind"]], spec.namespace, manifest["metadata"]["name"])
            raise
        return str(_Id(spec.shape, spec.namespace, names.object_name(job), spec.context))

    def status(self, job_id: str, folder: Path) -> JobStatus:
        """How far the job is; `unknown` once it was deleted or its `keep_s` ran out."""
        at = _parse(job_id)
        return _status(self._cluster(at.context), at)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Lines of the driver: of its last pod, or with `follow` of every pod until the job ends."""
        at = _parse(job_id)
        cluster = self._cluster(at.context)
        if follow:
            return Following(
                cluster, at.namespace, at.selector, lambda: _status(cluster, at), watch_s=self._watch_s
            ).lines()
        pods, _ = driver_pods(cluster, at.namespace, at.selector)
        if not pods:
            raise SubmitError(f"{job_id} has no pod whose log could be read: {_status(cluster, at).detail}")
        lines = cluster.log(at.namespace, pods[-1]["metadata"]["name"], follow=False)
        return (line.partition(" ")[2] for line in lines)

    def cancel(self, job_id: str, folder: Path) -> None:
        """Delete the job once its pods have ended: they are told first, and save; the driver of a RayJob is told nothing."""
        at = _parse(job_id)
        cluster = self._cluster(at.context)
        cluster.delete(at.carrier, at.namespace, at.name)
        if at.shape == "raycluster":
            cluster.delete(BY_KIND["RayCluster"], at.namespace, at.name)

    def _cluster(self, context: str | None) -> Cluster:
        return Cluster(context, connect_s=self._connect_s, read_s=self._read_s)


def _objects(job: Job, token: str) -> Sequence[Manifest]:
    secret = manifests.token_object(job, token)
    return [*manifests.helper_objects(job), *([secret] if secret else []), *manifests.main_objects(job)]


def _status(cluster: Cluster, at: _Id) -> JobStatus:
    try:
        carrier = cluster.get(at.carrier, at.namespace, at.name)
    except Missing:
        return JobStatus("unknown", "the job is not there: it was deleted, or its `launch.kubernetes.keep_s` ran out")
    return status_of(carrier, driver_pods(cluster, at.namespace, at.selector)[0])


def _parse(job_id: str) -> _Id:
    """Raises SubmitError where the id is none that `submit` returned."""
    found = re.fullmatch(r"(job|jobset|rayjob|raycluster):([-a-z0-9]+)/([-a-z0-9]+)(?:@(.*))?", job_id, re.DOTALL)
    if found is None:
        raise SubmitError(
            f"{job_id!r} is no job on Kubernetes; it reads SHAPE:NAMESPACE/NAME, or SHAPE:NAMESPACE/NAME@CONTEXT"
        )
    shape, namespace, name, context = found.groups()
    return _Id(shape, namespace, name, context)
