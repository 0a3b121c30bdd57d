"""Where this process stands in its job: read from what the scheduler says, into one `Place`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.launch.node.hostlist import expand
from nemo_rl_like.spec.hosts import HostGroup

Source = Literal["slurm", "kubernetes", "torchrun", "ray", "join", "alone"]

HEAD_HOST = "NRL_HEAD_HOST"
"""Kubernetes: name of the pod with index 0, by the headless service; another in every job."""


class PlaceError(NrlError):
    """What the scheduler says of this process contradicts itself or the spec."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Place:
    """One host's place in a job."""

    source: Source
    """Who says so."""
    nodes: int
    """Hosts of the job."""
    rank: int | None
    """0: makes the Ray head and runs the driver; None: the head numbers this host."""
    head: str | None = None
    """Name or address of rank 0's host; None on rank 0 where nobody has named it."""
    port: int | None = None
    """Port at which rank 0 waits for the others; None: the first free block of `launch.ports` that `key` leads to."""
    key: str = ""
    """What tells this job, and this start of it, from others on the same hosts."""
    names: tuple[str, ...] = ()
    """Hosts by rank, where the scheduler names them."""
    groups: tuple[int, ...] = ()
    """Hosts of each group in the order of ranks, where the scheduler has several."""
    job: str | None = None
    """What names the job in all its starts; None: nobody starts it again."""
    ray_address: str | None = None
    """A Ray that runs already: nothing is started but the driver."""

    @property
    def is_head(self) -> bool:
        """Whether this host runs the driver."""
        return self.rank == 0

    def name_of(self, rank: int) -> str:
        """Rank and host in words."""
        return f"rank {rank} ({self.names[rank]})" if rank < len(self.names) else f"rank {rank}"


def read_place(environ: Mapping[str, str], *, nodes: int, join: str | None = None) -> Place:
    """This process's place.

    Args:
        environ: the process's environment.
        nodes: `launch.nodes` and `launch.generation.nodes`.
        join: `HOST:PORT` of the head, where a person starts each host.

    Raises:
        PlaceError: several schedulers speak at once, one contradicts itself, or it has another number of hosts than the spec.
    """
    found = {name: read for name, (mark, read) in _READERS.items() if mark(environ)}
    if join is not None:
        found["join"] = lambda _environ, nodes: _joining(join, nodes)
    if len(found) > 1:
        raise PlaceError(
            f"this process is told its place by {' and by '.join(found)} ({', '.join(_variables(environ))}); "
            "start it by one of them, or unset the other's variables"
        )
    for read in found.values():
        place = read(environ, nodes)
        if place.nodes != nodes and place.ray_address is None:
            raise PlaceError(
                f"`launch.nodes` is {nodes}, but {place.source} started {place.nodes} hosts; ask it for as many, or change the field"
            )
        return place
    return Place("alone", nodes, 0)


def require_groups(place: Place, groups: Sequence[HostGroup]) -> None:
    """The scheduler made the groups of hosts that the spec asks for. Raises PlaceError."""
    wanted = tuple(group.nodes for group in groups)
    if place.ray_address is None and (place.groups or (place.nodes,)) != wanted:
        here = " and ".join(map(str, place.groups or (place.nodes,)))
        raise PlaceError(
            f"the spec has groups of {' and '.join(map(str, wanted))} hosts (`launch.nodes`, `launch.generation.nodes`), and {place.source} started "
            f"{here}; submit it with `nrl submit --to slurm`, which makes a heterogeneous job, or change `launch.generation`"
        )
    if place.ray_address is not None and len(wanted) > 1:
        raise PlaceError(
            "`launch.generation` is given, and a Ray that runs already (RAY_ADDRESS) does not tell its hosts apart; leave it out"
        )


def _joining(join: str, nodes: int) -> Place:
    host, _, port = join.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise PlaceError(f"--join is {join!r}, must be HOST:PORT as the first host prints it")
    if nodes < 2:
        raise PlaceError(
            f"--join is {join}, but `launch.nodes` is {nodes}: nobody is waited for; set it to the number of hosts"
        )
    return Place("join", nodes, None, head=host.strip("[]"), port=int(port))


def _slurm(environ: Mapping[str, str], _nodes: int) -> Place:
    rank, tasks = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes, node = _number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_NODEID")
    if tasks != nodes:
        raise PlaceError(
            f"the step has {tasks} tasks (SLURM_STEP_NUM_TASKS) on {nodes} hosts (SLURM_STEP_NUM_NODES), must be one a host; "
            "start it with `srun --ntasks-per-node=1`"
        )
    if rank != node:
        raise PlaceError(
            f"SLURM_PROCID is {rank} and SLURM_NODEID {node}: tasks do not stand in the order of hosts; use `srun --distribution=block`"
        )
    groups = _groups(environ)
    names = [name for group in groups for name in group] or expand(_text(environ, "SLURM_STEP_NODELIST"))
    if len(names) != nodes:
        told, fix = "SLURM_STEP_NODELIST names", "one of them is of another step"
        if groups:
            told, fix = (
                "SLURM_JOB_NODELIST_HET_GROUP_* name",
                f"start it in all groups, `srun --het-group=0-{len(groups) - 1}`",
            )
        raise PlaceError(f"{told} {len(names)} hosts and SLURM_STEP_NUM_NODES says {nodes}; {fix}")
    if rank >= nodes:
        raise PlaceError(f"SLURM_PROCID is {rank}, and the step has {nodes} tasks; one of them is of another step")
    job = f"slurm-{_text(environ, 'SLURM_JOB_ID')}"
    key = f"{job}.{environ.get('SLURM_STEP_ID', '0')}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    sizes = tuple(len(group) for group in groups)
    return Place("slurm", nodes, rank, head=names[0], key=key, names=tuple(names), groups=sizes, job=job)


def _groups(environ: Mapping[str, str]) -> list[list[str]]:
    """Hosts of each group of a heterogeneous job, in the order of ranks; SLURM_STEP_NODELIST sorts them by name."""
    count = _number(environ, "SLURM_HET_SIZE") if "SLURM_HET_SIZE" in environ else 0
    return [expand(_text(environ, f"SLURM_JOB_NODELIST_HET_GROUP_{i}")) for i in range(count)]


def _kubernetes(environ: Mapping[str, str], nodes: int) -> Place:
    rank = _number(environ, "JOB_COMPLETION_INDEX")
    if rank >= nodes:
        raise PlaceError(f"JOB_COMPLETION_INDEX is {rank}, and `launch.nodes` {nodes}; they are of different jobs")
    head = _text(environ, HEAD_HOST) if nodes > 1 else None
    job = f"kubernetes-{head or environ.get('HOSTNAME', '')}"
    return Place("kubernetes", nodes, rank, head=head, key=f"kubernetes-{head}", job=job)


def _torchrun(environ: Mapping[str, str], _nodes: int) -> Place:
    local = _number(environ, "LOCAL_WORLD_SIZE")
    if local != 1:
        raise PlaceError(
            f"torchrun started {local} processes on this host (LOCAL_WORLD_SIZE), must be one; use `--nproc-per-node 1`: "
            "ranks are started by Ray"
        )
    rank, nodes = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank >= nodes or _number(environ, "LOCAL_RANK") != 0:
        raise PlaceError(
            f"RANK is {rank}, LOCAL_RANK {environ['LOCAL_RANK']} and WORLD_SIZE {nodes}; they are of different starts"
        )
    key = f"torchrun-{environ.get('TORCHELASTIC_RUN_ID', '')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Place("torchrun", nodes, rank, head=_text(environ, "MASTER_ADDR"), key=key)


def _ray(environ: Mapping[str, str], _nodes: int) -> Place:
    address = _text(environ, "RAY_ADDRESS")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise PlaceError(
            f"RAY_ADDRESS is {address!r}, must be `host:port` of the Ray head's own port (GCS), not of its dashboard or client server"
        )
    return Place("ray", 1, 0, ray_address=address)


_Reader = Callable[[Mapping[str, str], int], Place]
_READERS: Mapping[str, tuple[Callable[[Mapping[str, str]], bool], _Reader]] = {
    "slurm": (lambda e: "SLURM_STEP_NUM_TASKS" in e and "SLURM_PROCID" in e, _slurm),
    "kubernetes": (lambda e: "JOB_COMPLETION_INDEX" in e, _kubernetes),
    "torchrun": (lambda e: "LOCAL_WORLD_SIZE" in e and "MASTER_ADDR" in e, _torchrun),
    "ray": (lambda e: bool(e.get("RAY_ADDRESS")), _ray),
}
_TOLD_BY = ("SLURM_PROCID", "JOB_COMPLETION_INDEX", "LOCAL_WORLD_SIZE", "RAY_ADDRESS")


def _variables(environ: Mapping[str, str]) -> list[str]:
    return [f"{name}={environ[name]}" for name in _TOLD_BY if name in environ]


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise PlaceError(
            f"{name} is not set, and the scheduler's other variables are; start this process by the scheduler itself"
        )
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _text(environ, name)
    if not value.isdecimal():
        raise PlaceError(f"{name} is {value!r}, must be a whole number")
    return int(value)
