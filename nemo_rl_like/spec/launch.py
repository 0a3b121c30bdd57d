"""The launch block: the hosts that an experiment takes, and what each scheduler must know. Nothing in it changes a result."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.container import ContainerSpec
from nemo_rl_like.spec.kubernetes import KubernetesSpec
from nemo_rl_like.spec.slurm import SlurmSpec

_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


class MountSpec(Spec):
    """A folder of the host, or of a volume, that the container sees."""

    source: Annotated[str, Field(pattern=r"^/")]
    """Absolute path on the host."""
    target: Annotated[str, Field(pattern=r"^/")]
    """Absolute path in the container."""
    read_only: bool = False
    """The container cannot write there."""


class LaunchSpec(Spec):
    """The job that `nrl submit` makes of an experiment."""

    nodes: PositiveInt = 1
    """Hosts of the job."""
    accelerator: Literal["gpu", "cpu"] = "gpu"
    """What ranks run on: the hosts' GPUs, or their CPU cores."""
    devices_per_node: PositiveInt = 8
    """GPUs that the job takes of each host, or ranks a host carries with `accelerator: cpu`."""
    cpus_per_node: PositiveInt | None = None
    """CPU cores that the job takes of each host; default: as the scheduler gives."""
    memory_gib_per_node: PositiveFloat | None = None
    """Host memory that the job takes of each host, in GiB; default: as the scheduler gives."""
    time_limit_min: PositiveInt | None = None
    """Wall time after which the scheduler ends the job, in minutes; default: the scheduler's own."""
    save_before_end_s: PositiveFloat = 300.0
    """How long before its wall time ends a job is told to save, in seconds."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait until every host with all its devices has joined, in seconds."""
    retries: NonNegativeInt = 3
    """How often a job that failed or lost a host is started again; each start resumes."""
    image: str | None = None
    """Container image; best by digest (`name@sha256:...`). Default: no container (Slurm), an error (Kubernetes, container)."""
    mounts: tuple[MountSpec, ...] = ()
    """Folders of the host that the container sees."""
    environment: dict[Annotated[str, Field(pattern=_VARIABLE)], str] = Field(default_factory=dict)
    """Variables of every process of the job. Never secrets: those stand in `secrets`, by reference."""
    slurm: SlurmSpec = SlurmSpec()
    """What Slurm must know."""
    kubernetes: KubernetesSpec = KubernetesSpec()
    """What Kubernetes must know."""
    container: ContainerSpec = ContainerSpec()
    """What a container runtime of this machine must know."""
