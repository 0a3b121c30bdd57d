"""The launch block: the hosts that an experiment takes, and what each scheduler must know. Nothing in it changes a result."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from nemo_rl_like.spec.base import Spec, form
from nemo_rl_like.spec.container import ContainerSpec
from nemo_rl_like.spec.hosts import GenerationSpec, HostGroup
from nemo_rl_like.spec.kubernetes import KubernetesSpec
from nemo_rl_like.spec.secret_names import is_secret
from nemo_rl_like.spec.slurm import SlurmSpec

_VARIABLE = form(r"^[A-Za-z_][A-Za-z0-9_]*$", "letters, digits and `_`, not a digit first")
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"^({_BYTE}\.){{3}}{_BYTE}$"
_PATH = "an absolute path (it begins with `/`), without control characters"


class MountSpec(Spec):
    """A folder of the host, or of a volume, that the container sees."""

    source: Annotated[str, form(r"^/[^\x00-\x1f\x7f]*$", _PATH)]
    """Absolute path on the host."""
    target: Annotated[str, form(r"^/[^\x00-\x1f\x7f]*$", _PATH)]
    """Absolute path in the container."""
    read_only: bool = False
    """The container cannot write there."""


class PortsSpec(Spec):
    """TCP ports of a job's hosts. Each host takes one block; nothing else of the job listens outside it, but a stage's own ranks."""

    first: Annotated[int, Field(ge=1024, le=65535)] = 12000
    """First port."""
    last: Annotated[int, Field(ge=1024, le=65535)] = 19999
    """Last port; below the ports that the kernel gives to outgoing connections (`ip_local_port_range`)."""
    per_node: Annotated[int, Field(ge=32)] = 400
    """Ports of one host's block: 12 for Ray's daemons, the others for its workers, one each."""

    @model_validator(mode="after")
    def _holds_a_block(self) -> PortsSpec:
        if self.last - self.first + 1 < self.per_node:
            raise ValueError(
                f"ports {self.first} to {self.last} hold no block of `per_node: {self.per_node}`; raise `last` or lower `per_node`"
            )
        return self


class LaunchSpec(Spec):
    """The job that `nrl submit` makes of an experiment."""

    nodes: PositiveInt = 1
    """Hosts of the job; those that train, where `generation` names others."""
    accelerator: Literal["gpu", "cpu"] = "gpu"
    """What ranks run on: the hosts' GPUs, or their CPU cores."""
    devices_per_node: PositiveInt = 8
    """GPUs that the job takes of each host, or ranks a host carries with `accelerator: cpu`."""
    cpus_per_node: PositiveInt | None = None
    """CPU cores that the job takes of each host; default: as the scheduler gives."""
    memory_gib_per_node: PositiveFloat | None = None
    """Host memory that the job takes of each host, in GiB; default: as the scheduler gives."""
    generation: GenerationSpec | None = None
    """Hosts for vLLM's replicas alone, which may differ in number, GPUs, memory and partition; Slurm only. Default: replicas stand on `nodes`."""
    time_limit_min: PositiveInt | None = None
    """Wall time after which the scheduler ends the job, in minutes; default: the scheduler's own."""
    save_before_end_s: PositiveFloat = 300.0
    """How long before its wall time ends a job is told to save, in seconds."""
    doctor: bool = True
    """Examine each host before the job starts on it (`nrl doctor`); a finding that would stop the job ends it there."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait until every host with all its devices has joined, in seconds."""
    lost_after_s: PositiveFloat = 60.0
    """Silence after which a host counts as lost, and a host that lost the first one ends itself, in seconds."""
    auth: Literal["token", "disabled"] = "token"
    """Who may use the job's Ray: `token`, who has a secret of the job (on one host the run makes its own); `disabled`, all who reach its ports."""
    addresses: dict[str, Annotated[str, form(_IPV4, "an IPv4 address, for example `10.0.0.1`")]] = Field(
        default_factory=dict
    )
    """IPv4 address of a host by the name that its scheduler gives it; default: what its name resolves to."""
    ports: PortsSpec = PortsSpec()
    """TCP ports that hosts listen on."""
    retries: NonNegativeInt = 3
    """How often a job that failed or lost a host is started again; each start resumes."""
    stops_without_progress: PositiveInt = 3
    """How often in a row a job that is started again (Slurm, Kubernetes) may be told to stop before it saved anything new; then it fails."""
    image: (
        Annotated[str, form(r"^[^\s\x00-\x1f\x7f]+$", "one word, for example `registry.example/nrl@sha256:...`")] | None
    ) = None
    """Container image; best by digest (`name@sha256:...`). Default: no container (Slurm), an error (Kubernetes, container)."""
    mounts: tuple[MountSpec, ...] = ()
    """Folders of the host that the container sees."""
    environment: dict[Annotated[str, _VARIABLE], str] = Field(default_factory=dict)
    """Variables of every process of the job. Never secrets: those stand in `secrets`, by reference."""
    slurm: SlurmSpec = SlurmSpec()
    """What Slurm must know."""
    kubernetes: KubernetesSpec = KubernetesSpec()
    """What Kubernetes must know."""
    container: ContainerSpec = ContainerSpec()
    """What a container runtime of this machine must know."""

    @property
    def groups(self) -> tuple[HostGroup, ...]:
        """The job's hosts by rank: those that train, then those that generate."""
        slurm = self.slurm
        train = HostGroup(
            role="train",
            field="launch",
            nodes=self.nodes,
            devices_per_node=self.devices_per_node,
            cpus_per_node=self.cpus_per_node,
            memory_gib_per_node=self.memory_gib_per_node,
            partition=slurm.partition,
            constraint=slurm.constraint,
            gres_type=slurm.gres_type,
        )
        return (train,) if self.generation is None else (train, self.generation.beside(train))

    @property
    def hosts(self) -> int:
        """All hosts of the job."""
        return sum(group.nodes for group in self.groups)

    def group_of(self, rank: int) -> HostGroup:
        """The group of the host with this rank."""
        return self.groups[-1] if rank >= self.nodes else self.groups[0]

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if is_secret(name):
                raise ValueError(
                    f"{name} looks like a secret, and these variables stand in files; list it under `secrets` as {{env: {name}}}"
                )
            if "\0" in value or "\n" in value:
                raise ValueError(f"{name} has a line break or a zero byte; schedulers carry one line a variable")
        return variables

    @model_validator(mode="after")
    def _saves_before_its_end(self) -> LaunchSpec:
        if self.time_limit_min is not None and self.save_before_end_s >= 60 * self.time_limit_min:
            raise ValueError(
                f"`save_before_end_s` is {self.save_before_end_s:g}, and the job ends after {60 * self.time_limit_min} s "
                "(`time_limit_min`); lower the one or raise the other"
            )
        return self
