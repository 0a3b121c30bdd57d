"""`WorkerGroup`: starts the ranks of a role with named axes, hosts services on them, ends them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_like.cluster import interrupt, roles
from nemo_rl_like.cluster.client import GroupClient, Pending, Worker
from nemo_rl_like.cluster.context import RankContext, axis_ranks, world_size
from nemo_rl_like.cluster.devices import threads_of_rank
from nemo_rl_like.cluster.environment import worker_variables
from nemo_rl_like.cluster.errors import ClusterStartError, DeadlineExceeded
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.cluster.watchdog import RUN_ID_ENV
from nemo_rl_like.cluster.worker import WorkerHost
from nemo_rl_like.spec.hosts import HostRole

logger = logging.getLogger(__name__)

_NO_DEVICE = {"memory": 1.0}
"""What a rank without a device asks for: a bundle must ask for something, and a share of a core would keep the last core
from a rank that needs it whole. Bytes."""
_CLOSE_S = 20.0


@dataclass(slots=True)
class WorkerGroup:
    """The running ranks of one role. Use as a context manager or call `shutdown`."""

    name: str
    """Role, for example `policy`."""
    axes: Mapping[str, int]
    """Named axes, the last one fastest."""
    session: RaySession
    """The Ray it runs on."""
    _client: GroupClient
    _placement: PlacementGroup
    _open: bool = field(default=True)

    @classmethod
    def start(
        cls,
        name: str,
        *,
        session: RaySession,
        axes: Mapping[str, int],
        env: Mapping[str, str] | None = None,
        threads: int = 0,
        devices: float = 1.0,
        spread: bool = False,
        role: HostRole | None = None,
    ) -> WorkerGroup:
        """Start one worker a rank and tell each its place.

        `env`: further variables, sent to the workers directly (not through Ray's records), so they may hold secrets.
        `threads`: CPU threads of a rank, 0 = cores / ranks. `devices`: share of a device that a rank takes (a GPU, or a
        core on a host without one); below 1 when groups share devices, 0 for a service that needs none. `spread`: over all hosts evenly,
        not on as few as carry the group. `role`: hosts that it stands on, where the job has hosts that train and others that generate.
        Raises ClusterStartError when the cluster cannot hold it, DeadlineExceeded after `cluster.start_timeout_s`.
        """
        ranks = world_size(axes)
        end = time.monotonic() + session.spec.start_timeout_s
        placement = _place(name, _bundle(devices, session) | _on_hosts(role, session), ranks, spread, session, end)
        nodes = _nodes_of_bundles(placement)
        threads = threads_of_rank(threads, max(Counter(nodes).values()))
        actors = [
            _start_actor(f"{session.log_folder}/{name}-{rank}.log", placement, bundle, devices, threads, session)
            for rank, bundle in enumerate(_bundles_by_node(nodes))
        ]
        try:
            client = _introduce(name, axes, actors, threads, env or {}, session, end)
        except (ClusterStartError, DeadlineExceeded):
            _remove(actors, placement)
            raise
        return cls(name, dict(axes), session, client, placement)

    def host(
        self, service: str, path: str, kwargs: Mapping[str, object] | None = None, *, deadline_s: float | None = None
    ) -> None:
        """On each rank, make `path` ("pkg.mod:Class") with (RankContext, **kwargs) and keep it as `service`.

        A `Hosted(service, attribute)` or an object reference in `kwargs` is replaced on the worker.
        Errors as in `GroupClient.wait`; the deadline is `cluster.start_timeout_s` unless given.
        """
        pending = self._client.submit(
            "", "host", service, path, dict(kwargs or {}), what=f"start of {self.name}.{service}"
        )
        self._client.wait(pending, deadline_s=deadline_s or self.session.spec.start_timeout_s)

    def submit(
        self, service: str, method: str, *args: object, ranks: Sequence[int] | None = None, what: str = ""
    ) -> Pending:
        """As `GroupClient.submit`."""
        return self._client.submit(service, method, *args, ranks=ranks, what=what)

    def call(
        self,
        service: str,
        method: str,
        *args: object,
        what: str = "",
        deadline_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> object:
        """As `GroupClient.call`; the deadline is `cluster.step_timeout_s` unless given."""
        seconds = deadline_s or self.session.spec.step_timeout_s
        return self._client.call(service, method, *args, what=what, deadline_s=seconds, ranks=ranks)

    def results(self, pending: Pending, *, deadline_s: float | None = None) -> list[object]:
        """As `GroupClient.results`; the deadline is `cluster.step_timeout_s` unless given."""
        return self._client.results(pending, deadline_s=deadline_s or self.session.spec.step_timeout_s)

    def wait(self, pending: Pending, *, deadline_s: float | None = None) -> None:
        """As `GroupClient.wait`; the deadline is `cluster.step_timeout_s` unless given."""
        self._client.wait(pending, deadline_s=deadline_s or self.session.spec.step_timeout_s)

    def client(self) -> GroupClient:
        """A handle that may be sent to another worker, which then calls this group itself."""
        return GroupClient(self.name, self._client.workers)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._client.workers)

    @property
    def addresses(self) -> tuple[str, ...]:
        """IP address of each rank's host."""
        return tuple(worker.info.address for worker in self._client.workers)

    def shutdown(self) -> None:
        """Let the services close (for at most 20 s), then end the workers. Safe to call twice."""
        if not self._open:
            return
        self._open = False
        actors = [worker.actor for worker in self._client.workers]
        if self._client.failure is None:
            self._close(actors)
        _remove(actors, self._placement)

    def _close(self, actors: Sequence[ActorHandle]) -> None:
        closing: list[ray.ObjectRef] = [actor.close.remote() for actor in actors]
        ready, late = ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for rank, ref in enumerate(closing):
            if ref in late:
                logger.warning("%s did not close within %g s", self._client.describe(rank), _CLOSE_S)
        for ref in ready:
            try:
                ray.get(ref)
            except RayError as error:
                logger.warning("worker group %s: a worker did not close: %s", self.name, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _bundle(devices: float, session: RaySession) -> dict[str, float]:
    if devices == 0:
        return dict(_NO_DEVICE)
    return {"GPU" if session.devices.kind == "gpu" else "CPU": devices}


def _on_hosts(role: HostRole | None, session: RaySession) -> dict[str, float]:
    return roles.of_worker(role) if role is not None and session.split else {}


def _place(
    name: str, bundle: dict[str, float], ranks: int, spread: bool, session: RaySession, end: float
) -> PlacementGroup:
    total = ray.cluster_resources()
    for resource, each in bundle.items():
        if each * ranks > total.get(resource, 0.0):
            raise ClusterStartError(
                f"worker group {name!r} needs {each * ranks:g} {resource} ({ranks} ranks of {each:g}), the cluster has "
                f"{total.get(resource, 0.0):g}; use fewer ranks or set `cluster.devices`"
            )
    placement = placement_group([bundle] * ranks, strategy="SPREAD" if spread else "PACK")
    try:
        ready = placement.ready()
        _poll([ready], end)
        ray.get(ready, timeout=max(0.1, end - time.monotonic()))
    except GetTimeoutError as error:
        remove_placement_group(placement)
        free = {k: v for k, v in ray.available_resources().items() if k in bundle}
        raise ClusterStartError(
            f"worker group {name!r} needs {ranks} x {bundle}, but only {free} is free; other groups hold the rest"
        ) from error
    return placement


def _nodes_of_bundles(placement: PlacementGroup) -> list[tuple[bool, str, str]]:
    """Where each bundle stands: (not the driver's node, address, node id)."""
    ids = placement_group_table(placement)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    mine = ray.get_runtime_context().get_node_id()
    return [(ids[bundle] != mine, addresses[ids[bundle]], ids[bundle]) for bundle in range(len(ids))]


def _bundles_by_node(nodes: Sequence[tuple[bool, str, str]]) -> list[int]:
    """Bundle of each rank: neighbouring ranks stand on one node, the first of them on the driver's where it carries any."""
    return sorted(range(len(nodes)), key=lambda bundle: (nodes[bundle], bundle))


def _start_actor(
    log_path: str, placement: PlacementGroup, bundle: int, devices: float, threads: int, session: RaySession
) -> ActorHandle:
    resources = _bundle(devices, session)
    started = (
        ray.remote(WorkerHost)
        .options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            memory=int(resources.get("memory", 0)) or None,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
            runtime_env={"env_vars": worker_variables(RUN_ID_ENV, session.run_id, threads)},
        )
        .remote(log_path)
    )
    return cast(ActorHandle, started)


def _introduce(
    name: str,
    axes: Mapping[str, int],
    actors: Sequence[ActorHandle],
    threads: int,
    env: Mapping[str, str],
    session: RaySession,
    end: float,
) -> GroupClient:
    """Wait until every worker is up, then tell each its rank and where rank 0 is."""
    infos = _gather(f"start of worker group {name!r}", [a.describe.remote() for a in actors], session, end)
    workers = [
        Worker(actor, info, f"{session.log_folder}/{name}-{rank}.log")
        for rank, (actor, info) in enumerate(zip(actors, infos, strict=True))
    ]
    contexts = [
        RankContext(
            group=name,
            rank=rank,
            world_size=len(workers),
            axes=dict(axes),
            axis_ranks=axis_ranks(rank, axes),
            master_addr=infos[0].address,
            master_port=infos[0].port,
            threads=threads,
            log_path=session.log_folder / f"{name}-{rank}.log",
            node=infos[rank].node,
        )
        for rank in range(len(workers))
    ]
    told = [w.actor.configure.remote(c, dict(env)) for w, c in zip(workers, contexts, strict=True)]
    _gather(f"configuration of worker group {name!r}", told, session, end)
    return GroupClient(name, workers)


def _gather(what: str, refs: Sequence[ray.ObjectRef], session: RaySession, end: float) -> list:
    try:
        _poll(refs, end)
        return ray.get(list(refs), timeout=max(0.1, end - time.monotonic()))
    except GetTimeoutError as error:
        _, late = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        running = [f"rank {rank}" for rank, ref in enumerate(refs) if ref in late]
        raise DeadlineExceeded(what, session.spec.start_timeout_s, running) from error
    except RayError as error:
        raise ClusterStartError(f"{what} failed: {error}") from error


def _poll(refs: Sequence[ray.ObjectRef], end: float) -> None:
    """Wait until all are there or time is up. Raises KeyboardInterrupt after Ctrl-C."""
    late = list(refs)
    while late and time.monotonic() < end:
        _, late = ray.wait(late, num_returns=len(late), timeout=interrupt.POLL_S, fetch_local=False)
        interrupt.check()


def _remove(actors: Sequence[ActorHandle], placement: PlacementGroup) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)
    remove_placement_group(placement)
