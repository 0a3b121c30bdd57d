"""The hosts of a job: one group of hosts that are alike, or one that trains and one that generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.slurm import GresType, Word

HostRole = Literal["train", "generate"]
"""What stands on a host: the ranks of policy, critic, reference and teacher; or vLLM's replicas."""


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts of a job that are alike, with every default filled in."""

    role: HostRole
    """What stands on them, where a job has both kinds."""
    field: str
    """The block of the spec that says so: `launch` or `launch.generation`."""
    nodes: int
    devices_per_node: int
    cpus_per_node: int | None
    memory_gib_per_node: float | None
    partition: str | None
    constraint: str | None
    gres_type: str | None

    @property
    def devices(self) -> int:
        """Devices of all its hosts."""
        return self.nodes * self.devices_per_node


class GenerationSpec(Spec):
    """Hosts that carry vLLM's replicas alone, beside those that train (`launch.nodes`). What is not given is as for those."""

    nodes: PositiveInt = 1
    """Hosts."""
    devices_per_node: PositiveInt | None = None
    """GPUs that the job takes of each host; default: `launch.devices_per_node`."""
    cpus_per_node: PositiveInt | None = None
    """CPU cores that the job takes of each host; default: `launch.cpus_per_node`."""
    memory_gib_per_node: PositiveFloat | None = None
    """Host memory that the job takes of each host, in GiB; default: `launch.memory_gib_per_node`."""
    partition: Word | None = None
    """Slurm's partition; default: `launch.slurm.partition`."""
    constraint: Word | None = None
    """Features that hosts must have; default: `launch.slurm.constraint`."""
    gres_type: GresType | None = None
    """Type of GPU; default: `launch.slurm.gres_type`."""

    def beside(self, train: HostGroup) -> HostGroup:
        """These hosts, with what is not given as it is for those that train."""
        return HostGroup(
            role="generate",
            field="launch.generation",
            nodes=self.nodes,
            devices_per_node=self.devices_per_node or train.devices_per_node,
            cpus_per_node=self.cpus_per_node or train.cpus_per_node,
            memory_gib_per_node=self.memory_gib_per_node or train.memory_gib_per_node,
            partition=self.partition or train.partition,
            constraint=self.constraint or train.constraint,
            gres_type=self.gres_type or train.gres_type,
        )
