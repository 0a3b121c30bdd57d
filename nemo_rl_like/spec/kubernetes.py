"""What Kubernetes must know of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec, form

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_LABEL_WORDS = "lower-case letters, digits and `-`, a letter or digit at both ends"
_WORD_WORDS = "at most 63 letters, digits, `-`, `_` and `.`, a letter or digit at both ends"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"

Label = Annotated[str, form(rf"^{_LABEL}$", f"{_LABEL_WORDS}, at most 63")]
"""Name of an object that is one label of a DNS name (RFC 1123): at most 63 of a-z, 0-9 and `-`."""
Domain = Annotated[
    str, form(rf"^{_DOMAIN}$", f"{_LABEL_WORDS}, in parts of at most 63 with dots between them", max_length=253)
]
"""Name of an object that is a DNS name: labels with dots between them."""
Key = Annotated[
    str, form(rf"^({_DOMAIN}/)?{_WORD}$", f"{_WORD_WORDS}; before it a domain and `/` if it has one", max_length=317)
]
"""Key of a label, annotation, taint or resource: a word, after a domain and `/` where it has one."""
LabelValue = Annotated[str, form(rf"^({_WORD})?$", _WORD_WORDS)]
"""Value of a label: at most 63 letters, digits, `-`, `_` and `.`."""
Folder = Annotated[str, form(r"^/[^:\x00-\x1f]*$", "an absolute path (it begins with `/`), without `:`")]
"""Absolute path in the container; Kubernetes takes no `:` in one."""


class SecretKeySpec(Spec):
    """A key of a Kubernetes Secret; its value is never read by `nrl`."""

    secret: Domain
    """Name of the Secret, in the job's namespace."""
    key: Annotated[str, form(r"^[-._a-zA-Z0-9]{1,253}$", "letters, digits, `-`, `_` and `.`")]
    """Key in it."""


class QueueSpec(Spec):
    """The queue that admits the job as a whole."""

    kind: Literal["kueue", "volcano", "kai"]
    """Kueue, Volcano, or NVIDIA's KAI scheduler."""
    name: Label
    """Name of the queue (Kueue: the LocalQueue)."""


class TolerationSpec(Spec):
    """A taint of hosts that the job's pods accept."""

    key: Key
    """Key of the taint."""
    value: LabelValue | None = None
    """Its value; default: any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Its effect; default: any."""


class TopologySpec(Spec):
    """How the job's pods lie in the cluster."""

    key: Key
    """Label of hosts that names a domain, for example `topology.kubernetes.io/zone` or `kubernetes.io/hostname`."""
    place: Literal["together", "apart"]
    """All in one domain (a rack, a fabric), or evenly over the domains."""
    required: bool = True
    """Wait until it can be so; `false`: as far as it can."""


class RdmaSpec(Spec):
    """InfiniBand, RoCE or EFA devices of a pod; adds the capability IPC_LOCK, which pins memory."""

    resource: Key
    """Resource of the device plugin, for example `rdma/hca_shared_devices_a` or `vpc.amazonaws.com/efa`."""
    count: PositiveInt = 1
    """Devices a pod."""


class ClaimSpec(Spec):
    """A persistent volume claim that every pod of the job mounts."""

    claim: Domain
    """Name of the claim, in the job's namespace; several hosts need access mode ReadWriteMany."""
    path: Folder
    """Where the container sees it."""
    sub_path: (
        Annotated[str, form(r"^[^/:\x00-\x1f][^:\x00-\x1f]*$", "a path that does not begin with `/`, without `:`")]
        | None
    ) = None
    """Folder of the volume; default: all of it."""
    read_only: bool = False
    """The container cannot write there."""


class KubernetesSpec(Spec):
    """Where in a Kubernetes cluster a job runs, and as what."""

    context: str | None = None
    """Context of the kubeconfig; default: its current one, or the pod's own account inside a cluster."""
    namespace: Label = "default"
    """Namespace."""
    shape: Literal["job", "rayjob", "raycluster", "jobset"] = "job"
    """`job`: Indexed Job with a headless service; `rayjob`, `raycluster`: KubeRay's; `jobset`: JobSet's."""
    queue: QueueSpec | None = None
    """Queue that admits the job; default: the cluster's scheduler, pod by pod."""
    priority_class: Domain | None = None
    """PriorityClass of the pods; default: the cluster's."""
    service_account: Domain | None = None
    """Service account of the pods; default: the namespace's. Its token is never mounted."""
    image_pull_secrets: tuple[Domain, ...] = ()
    """Secrets that pull the image."""
    runtime_class: Domain | None = None
    """RuntimeClass of the pods, for example `nvidia`; default: the cluster's."""
    node_selector: dict[Key, LabelValue] = Field(default_factory=dict)
    """Labels that hosts must have."""
    tolerations: tuple[TolerationSpec, ...] = ()
    """Taints that the pods accept."""
    topology: tuple[TopologySpec, ...] = ()
    """How the pods lie in the cluster."""
    labels: dict[Key, LabelValue] = Field(default_factory=dict)
    """Labels of the job and its pods."""
    annotations: dict[Key, str] = Field(default_factory=dict)
    """Annotations of the job and its pods."""
    claims: tuple[ClaimSpec, ...] = ()
    """Volumes; `output` must lie in one that can be written."""
    gpu_resource: Key = "nvidia.com/gpu"
    """Resource that a device counts as; a MIG profile has its own, such as `nvidia.com/mig-3g.40gb`."""
    rdma: RdmaSpec | None = None
    """RDMA devices of each pod."""
    shm_gib: PositiveFloat = 8.0
    """Size of /dev/shm, in GiB: Ray's object store, NCCL and weights on their way to vLLM. Counted in `memory_gib_per_node`."""
    scratch_gib: PositiveFloat = 20.0
    """Most that /tmp and the home folder may each hold on the host's disk, in GiB: caches and Ray's logs."""
    user: PositiveInt = 10001
    """User id of every process; never root."""
    group: PositiveInt = 10001
    """Group id of every process and of the volumes."""
    read_only_root: bool = True
    """Only volumes, /tmp, /dev/shm and the home folder can be written."""
    keep_s: NonNegativeInt = 86400
    """How long an ended job is kept (its pods, with their logs), in seconds."""
