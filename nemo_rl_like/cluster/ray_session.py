"""Starts a local Ray or joins one, and ends everything it started, however the driver ends."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import ray
from ray.exceptions import RaySystemError

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.cluster import auth, interrupt, joined, temp_folder, watchdog
from nemo_rl_like.cluster.devices import Devices, visible_devices
from nemo_rl_like.cluster.environment import allowed, replaced_environ
from nemo_rl_like.cluster.errors import ClusterStartError
from nemo_rl_like.cluster.joined import JobCluster
from nemo_rl_like.cluster.last_words import DRIVER_SIGNALS
from nemo_rl_like.spec.cluster import ClusterSpec

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_WATCHDOG_S = 60.0
_SESSION_FILE = "session.json"
_HELPERS = ("ray/dashboard/dashboard.py", "ray/_private/log_monitor.py", "ray/autoscaler/_private/monitor.py")


@dataclass(slots=True)
class RaySession:
    """A running Ray that belongs to this driver. Use it as a context manager, from the driver's main thread:
    Ray's daemons are told by the kernel to end with the thread that started them."""

    run_id: str
    """Unique id; every process of the run has it as `NRL_RUN_ID`."""
    spec: ClusterSpec
    """What was asked for."""
    devices: Devices
    """What ranks run on."""
    log_folder: Path
    """`<output>/logs`: one file a worker."""
    temp_dir: Path | None
    """Folder of this run's temporary files and of Ray's; None when an existing cluster was joined."""
    split: bool = False
    """Whether the job has hosts that train and others that generate."""
    _watchdog: int = field(default=0, repr=False)
    _open: bool = field(default=True, repr=False)

    @classmethod
    def start(cls, spec: ClusterSpec, output: Path) -> RaySession:
        """Start a local Ray, or join the job's or `spec.address`.

        Raises SpecError for an authentication or address that cannot work, ClusterStartError when Ray does not come up
        with every host that the job was promised, or this process is already part of a Ray.
        """
        if ray.is_initialized():
            raise ClusterStartError("this process is already connected to a Ray; end that session first")
        job = joined.of_environment(os.environ)
        spec = _with_job(spec, job)
        auth.mode_of(spec)
        run_id = uuid.uuid4().hex[:16]
        log_folder = output.absolute() / "logs"
        log_folder.mkdir(parents=True, exist_ok=True)
        temp_dir = temp_folder.make(run_id) if spec.address is None else None
        environ = _ray_environ(spec, job.variables if job is not None else (), temp_dir)
        split = job is not None and job.generation_devices > 0
        session = cls(run_id, spec, visible_devices(spec), log_folder, temp_dir, split)
        environ.update(session._marks())
        with ExitStack() as undo:
            undo.callback(session.shutdown)
            interrupt.install()
            session._watchdog = watchdog.start(run_id, session._mark_of_temp_dir)
            session._connect(environ)
            interrupt.check()
            if spec.address is not None:
                session.devices = _devices_of_cluster(job, spec)
            os.environ.update(session._marks())
            session._describe()
            undo.pop_all()
        return session

    def _connect(self, environ: dict[str, str]) -> None:
        terminate = signal.getsignal(signal.SIGTERM)
        # Ray's daemons inherit this mask: a signal to the whole process group reaches the driver alone, which saves.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DRIVER_SIGNALS)
        try:
            with replaced_environ(environ):
                if self.spec.address is None:
                    self._start_within(self.spec.start_timeout_s)
                else:
                    _join(self.spec.address, self.spec.start_timeout_s)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminate)  # Ray's own handler would exit without a checkpoint
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start_within(self, seconds: float) -> None:
        """Start Ray; it gives its daemons 30 s, which a busy machine may exceed, so try again while there is time."""
        end = time.monotonic() + seconds
        while True:
            try:
                return self._start_local()
            except Exception as error:  # when its daemons are late, Ray raises nothing narrower
                watchdog.kill_run(self.run_id, self._mark_of_temp_dir)
                if time.monotonic() > end or isinstance(error, ValueError):
                    raise ClusterStartError(
                        f"Ray did not start within {seconds:g} s ({type(error).__name__}: {error}); is the machine busy "
                        "or `cluster.object_store_gib` too large? Else raise `cluster.start_timeout_s`"
                    ) from error
                logger.warning("Ray did not start (%s), trying again", error)

    def _start_local(self) -> None:
        gpus = self.devices.count if self.devices.kind == "gpu" else 0
        cores = len(os.sched_getaffinity(0))
        ray.init(
            address="local",
            num_cpus=max(cores, self.devices.count),
            num_gpus=gpus,
            object_store_memory=int(self.spec.object_store_gib * _GIB),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            namespace=f"nrl-{self.run_id}",
            _temp_dir=f"{self.temp_dir}/{temp_folder.RAYS}",
        )

    def _marks(self) -> dict[str, str]:
        """What driver and workers have in their environment while the session lives. The second is Ray's: a failed call
        whose value nobody fetches is no news, since every wait looks at how each rank ended."""
        return {watchdog.RUN_ID_ENV: self.run_id, "RAY_IGNORE_UNHANDLED_ERRORS": "1"}

    @property
    def _mark_of_temp_dir(self) -> str:
        """What the command lines of Ray's own processes contain; nothing at all when a cluster was joined."""
        return str(self.temp_dir or f"{tempfile.gettempdir()}/nrl-{self.run_id}")

    def _describe(self) -> None:
        text = json.dumps({"run_id": self.run_id, "temp_dir": self._mark_of_temp_dir, "driver_pid": os.getpid()})
        (self.log_folder / _SESSION_FILE).write_text(text + "\n", encoding="utf-8")

    def shutdown(self) -> None:
        """End Ray and every process of the run, and remove Ray's folder. Safe to call twice."""
        if not self._open:
            return
        self._open = False
        if ray.is_initialized():
            self._end_helpers()
            ray.shutdown()
        for name in self._marks():
            os.environ.pop(name, None)
        watchdog.finish(self._watchdog, _WATCHDOG_S)
        left = watchdog.kill_run(self.run_id, self._mark_of_temp_dir)
        if left:
            logger.warning("processes of run %s that could not be ended: %s", self.run_id, sorted(left))
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)
        interrupt.uninstall()

    def _end_helpers(self) -> None:
        """End Ray's Python daemons: they would sit out the second of grace that Ray gives each, one after another."""
        for pid in watchdog.processes_of_run(self.run_id, self._mark_of_temp_dir):
            if any(name in watchdog.command_line(pid) for name in _HELPERS):
                watchdog.kill(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _with_job(spec: ClusterSpec, job: JobCluster | None) -> ClusterSpec:
    """The spec with the job's address and authentication. Raises SpecError when it names another cluster."""
    if job is None or job.address is None:
        return spec
    if spec.address not in (None, job.address):
        raise SpecError(
            f"`cluster.address` is {spec.address}, but the job's own Ray is at {job.address}; leave `cluster.address` out"
        )
    return spec.model_copy(update={"address": job.address, "auth": job.auth})


def _ray_environ(spec: ClusterSpec, further: Sequence[str], temp_dir: Path | None) -> dict[str, str]:
    environ = allowed(os.environ) | {name: os.environ[name] for name in further if name in os.environ}
    environ.pop("RAY_ADDRESS", None)  # only the spec or the job says which cluster is joined
    if temp_dir is not None:
        environ["TMPDIR"] = str(temp_dir)
    environ.update(
        auth.variables(spec, os.environ, temp_dir),
        RAY_worker_niceness="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        RAY_gcs_server_port_wait_time_s=str(int(spec.start_timeout_s)),
    )
    return environ


def _join(address: str, timeout_s: float) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterStartError(f"`cluster.address` is {address!r}, must be `host:port` of a running Ray head")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise ClusterStartError(
            f"`cluster.address` {address}: nothing answers there ({error}); start a Ray head or drop the field"
        ) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (RaySystemError, ConnectionError, RuntimeError) as error:
        raise ClusterStartError(f"`cluster.address` {address} cannot be joined: {error}") from error


def _devices_of_cluster(job: JobCluster | None, spec: ClusterSpec) -> Devices:
    """What the joined Ray has, once every promised host is there. Raises ClusterStartError naming those that are."""
    if job is not None:
        _wait_for(job, spec.start_timeout_s)
        return Devices(job.kind, spec.devices or job.devices)
    total = ray.cluster_resources()
    gpus = int(total.get("GPU", 0))
    return Devices("gpu" if gpus else "cpu", spec.devices or gpus or int(total.get("CPU", 0)))


def _wait_for(job: JobCluster, seconds: float) -> None:
    resource, devices = job.kind.upper(), job.devices + job.generation_devices
    end = time.monotonic() + seconds
    while True:
        there = {n["NodeManagerAddress"]: int(n["Resources"].get(resource, 0)) for n in ray.nodes() if n["Alive"]}
        count = sum(there.values())
        if len(there) >= job.nodes and count >= devices:
            return
        if time.monotonic() > end:
            raise ClusterStartError(
                f"after {seconds:g} s Ray has {len(there)} of {job.nodes} hosts and {count} of {devices} {resource}s: "
                f"{there}; look at the logs of the hosts that are missing, or raise `cluster.start_timeout_s`"
            )
        time.sleep(interrupt.POLL_S)
        interrupt.check()
