"""What of a spec Kubernetes, or a shape of a job on it, cannot honour: each names the field, its value, the limit and the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from nemo_rl_like.launch import requirements
from nemo_rl_like.launch.kubernetes import names
from nemo_rl_like.launch.kubernetes.pod import reserved_variables
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.kubernetes import KubernetesSpec, SecretKeySpec
from nemo_rl_like.spec.loader import resolved_yaml

LARGEST_MAP = (1 << 20) - 1024
"""Bytes of a spec that a ConfigMap holds beside its metadata: the API's limit is 1 MiB."""
RAY_SHAPES = ("rayjob", "raycluster")
SET_BY_US = ("NRL_HEAD_HOST", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "JOB_COMPLETION_INDEX")
RESERVED_KEYS = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/component",
    "kueue.x-k8s.io/queue-name",
    "kai.scheduler/queue",
    "ray.io/scheduler-name",
    "volcano.sh/queue-name",
    "scheduling.k8s.io/group-name",
)
"""Labels and annotations that the job sets itself."""


def problems(job: Job) -> list[str]:
    """Every problem of the job on Kubernetes; needs no cluster."""
    spec = job.spec
    return [
        *requirements.image(spec),
        *requirements.variables(spec, {*reserved_variables(job), *SET_BY_US}),
        *requirements.memory(spec, "launch.kubernetes.shm_gib", spec.launch.kubernetes.shm_gib),
        *requirements.paths(spec, "launch.kubernetes.claims", [c.path for c in spec.launch.kubernetes.claims]),
        *_host(spec),
        *_secrets(spec),
        *_folders(spec),
        *_keys(spec.launch.kubernetes),
        *_shape(spec),
        *_size(spec),
    ]


def _host(spec: ExperimentSpec) -> Iterator[str]:
    launch = spec.launch
    if launch.mounts:
        yield (
            f"`launch.mounts` has {launch.mounts[0].source!r}, a folder of the host, which pod security forbids; put the data in a volume and "
            "list its claim in `launch.kubernetes.claims`"
        )


def _secrets(spec: ExperimentSpec) -> Iterator[str]:
    places: dict[str, SecretKeySpec] = {}
    for key, secret in spec.secrets.items():
        if secret.kubernetes is None:
            yield (
                f"`secrets.{key}` has no `kubernetes`, and a pod sees no variable of this machine; write "
                f"`kubernetes: {{secret: NAME, key: KEY}}`, the Secret that holds {secret.env}"
            )
        elif places.setdefault(secret.env, secret.kubernetes) != secret.kubernetes:
            yield f"`secrets.{key}.env` is {secret.env}, which another secret sets to another key; give each a variable of its own"


def _folders(spec: ExperimentSpec) -> Iterator[str]:
    claims = spec.launch.kubernetes.claims
    written = [PurePosixPath(c.path) for c in claims if not c.read_only]
    output = PurePosixPath(spec.output)
    if not output.is_absolute() or ".." in output.parts or not any(p in output.parents for p in written):
        there = ", ".join(map(str, written)) or "none"
        yield (
            f"`output` is {spec.output!r}, and it or the folder {output.name}.jobs beside it would end with the pod; write an absolute path below "
            f"that of a volume which can be written (`launch.kubernetes.claims`: {there})"
        )
    own = [*names.SCRATCH.values(), names.SHM, names.SPEC_FOLDER, names.TOKEN_FOLDER]
    for path, count in Counter(str(PurePosixPath(c.path)) for c in claims).items():
        if count > 1:
            yield f"`launch.kubernetes.claims` has the path {path} {count} times; give each claim a path of its own"
        if path == "/" or any(PurePosixPath(o).is_relative_to(path) for o in own):
            yield f"`launch.kubernetes.claims` has the path {path}, which the job itself uses; choose another"
    for claim in claims:
        for field, value in (("path", claim.path), ("sub_path", claim.sub_path or "")):
            if ".." in PurePosixPath(value).parts:
                yield f"`launch.kubernetes.claims` has the {field} {value!r}; Kubernetes takes no `..` in one: write it out"


def _keys(spec: KubernetesSpec) -> Iterator[str]:
    for field, given in (("labels", spec.labels), ("annotations", spec.annotations)):
        for key in sorted(set(given) & set(RESERVED_KEYS)):
            yield f"`launch.kubernetes.{field}.{key}` is set by the job itself (queues: `launch.kubernetes.queue`); remove it"


def _shape(spec: ExperimentSpec) -> Iterator[str]:
    launch, shape = spec.launch, spec.launch.kubernetes.shape
    if shape not in RAY_SHAPES:
        return
    if launch.time_limit_min is not None:
        yield (
            f"`launch.time_limit_min` is {launch.time_limit_min}, and KubeRay ends a `{shape}` without telling the driver to save first "
            "(`launch.save_before_end_s`); leave it out, or set `launch.kubernetes.shape` to `job` or `jobset`"
        )
    if shape == "raycluster" and launch.retries:
        yield (
            f"`launch.retries` is {launch.retries}, and KubeRay retries a job in a cluster of its own only; set it to 0, or "
            "`launch.kubernetes.shape: rayjob`"
        )
    queue = launch.kubernetes.queue
    if queue is not None and queue.kind == "kai":
        yield (
            f"`launch.kubernetes.queue.kind` is kai, and the pod that submits a `{shape}` would stand outside of KAI's group; set "
            "`launch.kubernetes.shape` to `job` or `jobset`"
        )


def _size(spec: ExperimentSpec) -> Iterator[str]:
    size = len(resolved_yaml(spec).encode("utf-8", "surrogatepass"))
    if size > LARGEST_MAP:
        yield (
            f"the spec has {size} bytes, and a ConfigMap holds {LARGEST_MAP}; move long texts (templates, prompts) into files on a volume"
        )
