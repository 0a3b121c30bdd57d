"""One host of a job, from its start to its end.

Rank 0 makes Ray's head, waits for the others, runs the driver and tells all how it ended; the others join and stay until then. A signal to
any host is a signal to the driver, which saves. Whatever ends it, nothing of it is left on the host.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from nemo_rl_like.artifacts.errors import StoppedBySignal
from nemo_rl_like.cluster.environment import allowed
from nemo_rl_like.cluster.joined import JobCluster
from nemo_rl_like.launch.doctor.examine import require_fit
from nemo_rl_like.launch.node import held, token
from nemo_rl_like.launch.node.address import interface_of, own_address, resolve
from nemo_rl_like.launch.node.daemons import RayDaemons, Resources
from nemo_rl_like.launch.node.devices import count_devices
from nemo_rl_like.launch.node.driver import Driver
from nemo_rl_like.launch.node.place import Place, read_place, require_groups
from nemo_rl_like.launch.node.ports import Block, blocks, take
from nemo_rl_like.launch.node.rendezvous import Gathering, HostLost, Membership, Self
from nemo_rl_like.launch.node.stops import NoProgress, count_stop, saved
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_GIB = 1 << 30


def run_node(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    join: str | None = None,
    until: str | None = None,
    stop_file: Path | None = None,
) -> int:
    """This host's part of the job that a spec describes; returns the driver's exit code, on every host.

    Args:
        path: the spec; a token beside it, or `RAY_AUTH_TOKEN_PATH`, is the job's secret.
        overrides: `a.b.c=value`, the same on every host.
        join: `HOST:PORT` of the first host, where no scheduler says it.
        until: last stage to run; default: all.
        stop_file: once this file is there, the driver is told to save and stop, as by SIGUSR1. For schedulers whose signals reach every
            process of a job.

    Raises:
        PlaceError, SpecError, HostUnfit: before anything is started.
        DevicesMissing, HostsMissing, HostLost, RayEnded, PortsTaken, NoAddress: what the cluster lacks, by name.
        NoProgress: told to stop once more before anything new was saved.
    """
    spec = load_spec(path, overrides)
    place = read_place(os.environ, nodes=spec.launch.hosts, join=join)
    require_groups(place, spec.launch.groups)
    arguments = ["run", str(path), *overrides, "--resume", "--plain", *(["--until", until] if until else [])]
    with _Signals.heard(stop_file) as signals:
        if spec.launch.doctor and place.ray_address is None:
            require_fit(spec, Path(spec.output), place.rank or 0)
        host = _Host(spec, place, path.parent, arguments, signals)
        try:
            return host.run()
        except _Stopped as stop:
            logger.info("stopped by %s before the driver had started", stop)
            return host.ended(StoppedBySignal.exit_code)


class _Stopped(Exception):
    """A signal came before there was a driver."""


@dataclass(slots=True)
class _Signals:
    """Signals that came and were not yet answered."""

    stop_file: Path | None = None
    waiting: list[int] = field(default_factory=list)

    @classmethod
    @contextmanager
    def heard(cls, stop_file: Path | None) -> Iterator[_Signals]:
        """Remember the signals that a scheduler sends, from the main thread, until the end of the block."""
        found = cls(stop_file)
        before = {number: signal.signal(number, found._remember) for number in held.ANSWERED}
        held.release()
        try:
            yield found
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.waiting.append(number)

    def take(self) -> list[int]:
        """Those that came since the last look; the stop file counts as SIGUSR1, once."""
        if self.stop_file is not None and self.stop_file.exists():
            self.stop_file = None
            self.waiting.append(signal.SIGUSR1)
        came = list(self.waiting)
        del self.waiting[: len(came)]
        return came

    def check(self) -> None:
        """Raise _Stopped if one came."""
        for number in self.take():
            raise _Stopped(signal.Signals(number).name)


class _Host:
    """What this host does for its job."""

    def __init__(
        self, spec: ExperimentSpec, place: Place, folder: Path, arguments: Sequence[str], signals: _Signals
    ) -> None:
        self.spec, self.launch, self.place = spec, spec.launch, place
        self.arguments, self.signals = arguments, signals
        self.name = place.names[place.rank] if place.names and place.rank is not None else socket.gethostname()
        self.group = spec.launch.group_of(place.rank or 0)
        self.devices = 0 if place.ray_address else count_devices(spec.launch, self.group, self.name)
        self.token = self._find_token(folder)
        self.saved = saved(Path(spec.output))

    def run(self) -> int:
        """The part that the place asks for."""
        daemons = RayDaemons(self._log_file())
        try:
            if self.place.ray_address is not None or self.place.nodes == 1:
                return self._alone()
            return self._lead(daemons) if self.place.is_head else self._follow(daemons)
        finally:
            daemons.stop()

    def _alone(self) -> int:
        """One host, or a Ray that others have started: the driver does all."""
        total = self.launch.nodes * self.launch.devices_per_node
        return self._drive(self._cluster(self.place.ray_address, total), lambda driver: None)

    def _lead(self, daemons: RayDaemons) -> int:
        block, listener = take(self.launch.ports, self.place.key)
        in_pod = self.place.source == "kubernetes"  # its service may not have named it yet
        address = own_address(None if in_pod else self.place.head or self.name, self.launch.addresses)
        gathering = Gathering(
            listener, self.place, self._self(), token=self._secret(), lost_after_s=self.launch.lost_after_s
        )
        code = 1
        try:
            self._start(daemons, block, address, None)
            self._wait_until_up(daemons)
            gathering.open(f"{address}:{block.gcs}")
            if self.place.source == "alone":
                logger.info("on each other host: nrl node SPEC --join %s:%d", address, block.first)
            total = gathering.wait_for_all(self.launch.start_timeout_s, self._watch(daemons))
            code = self._drive(self._cluster(f"{address}:{block.gcs}", total), self._attend(daemons, gathering))
            return code
        except NoProgress as error:
            code = error.exit_code
            raise
        finally:
            gathering.end(code)

    def _attend(self, daemons: RayDaemons, gathering: Gathering) -> Callable[[Driver], None]:
        """What rank 0 looks at while the driver runs."""

        def look(driver: Driver) -> None:
            daemons.check()
            while not gathering.events.empty():
                event = gathering.events.get()
                if event.kind == "lost":
                    driver.lose(event.text)
                else:
                    logger.info("%s", event.text)
                    driver.tell(event.number)

        return look

    def _follow(self, daemons: RayDaemons) -> int:
        block, holder = take(self.launch.ports, f"{self.place.key}-{self.name}")
        with holder:
            member = self._join()
            self.signals.stop_file = (
                None  # the head, which may have read it before anybody could join, tells it from now on
            )
            try:
                self._start(daemons, block, member.address, member.ray_address)
                return self._stay(daemons, member)
            except Exception as error:
                member.tell({"say": "failed", "why": str(error)[:2000]})
                raise
            finally:
                member.close()

    def _join(self) -> Membership:
        place = self.place
        ports = [place.port] if place.port is not None else [b.first for b in blocks(self.launch.ports, place.key)]
        return Membership.join(
            place,
            self._self(),
            lambda: resolve(str(place.head), self.launch.addresses),
            ports,
            token=self._secret(),
            lost_after_s=self.launch.lost_after_s,
            seconds=self.launch.start_timeout_s,
            check=self.signals.check,
            source=self.launch.addresses.get(self.name),
        )

    def _stay(self, daemons: RayDaemons, member: Membership) -> int:
        """Wait for the end; returns the driver's exit code."""
        while True:
            for number in self.signals.take():
                member.tell({"say": "stop", "signal": number})
            if not member.events.empty():
                event = member.events.get()
                if event.kind == "lost":
                    raise HostLost(
                        f"rank {member.rank} ({self.name}): {event.text}; this host's part of the job is ended"
                    )
                logger.info("%s", event.text)
                return event.number
            daemons.check()
            time.sleep(_POLL_S)

    def _drive(self, cluster: JobCluster, look: Callable[[Driver], None]) -> int:
        self.signals.check()
        driver = Driver(self.arguments, self._driver_environ(cluster), lost_after_s=self.launch.lost_after_s)
        try:
            while (code := driver.poll()) is None:
                look(driver)
                self._pass_on(driver)
                time.sleep(_POLL_S)
            if code not in (0, StoppedBySignal.exit_code):
                time.sleep(_POLL_S)  # what ended it may have been a signal that is still on its way to this process
                self._pass_on(driver)
                code = driver.job_code(reach_workers=self.place.source == "slurm")
        finally:
            driver.kill()
        return self.ended(code)

    def _pass_on(self, driver: Driver) -> None:
        for number in self.signals.take():
            driver.tell(number)

    def ended(self, code: int) -> int:
        """The job's exit code. Raises NoProgress for one that its scheduler would start again for nothing."""
        if code == StoppedBySignal.exit_code and self.place.job is not None and self.place.is_head:
            count_stop(Path(self.spec.output), self.place.job, self.launch, self.saved)
        return code

    def _cluster(self, address: str | None, devices: int) -> JobCluster:
        generation = sum(group.devices for group in self.launch.groups if group.role == "generate")
        return JobCluster(
            address=address,
            auth=self._auth(),
            kind=self.launch.accelerator,
            devices=devices - generation,
            nodes=self.launch.hosts,
            generation_devices=generation,
            variables=tuple(self.launch.environment),
        )

    def _auth(self) -> Literal["token", "disabled"]:
        """Ray's mode: that of a Ray which runs already; else as asked, or on one host, whose driver makes a token, none where this environment says so."""
        mode: Literal["token", "disabled"] = "token" if os.environ.get("RAY_AUTH_MODE") == "token" else "disabled"
        if self.place.ray_address is not None:
            return mode if os.environ.get(token.PATH_ENV) else "disabled"
        if self.place.nodes == 1 and self.launch.auth == "token":
            return mode
        return self.launch.auth

    def _find_token(self, folder: Path) -> Path | None:
        if self.place.ray_address is not None or self.place.nodes == 1 or self._auth() == "disabled":
            return None
        return token.find(folder)

    def _secret(self) -> bytes:
        return b"" if self.token is None else self.token.read_bytes().strip()

    def _self(self) -> Self:
        return Self(self.name, self.devices)

    def _resources(self) -> Resources:
        on_cpu = self.launch.accelerator == "cpu"
        cores = len(os.sched_getaffinity(0))
        return Resources(
            cpus=self.devices if on_cpu else max(cores, self.devices),
            gpus=0 if on_cpu else self.devices,
            object_store_bytes=int(self.spec.cluster.object_store_gib * _GIB),
            role=self.group.role if len(self.launch.groups) > 1 else None,
        )

    def _environ(self) -> dict[str, str]:
        """What every process of the job has: the allow-list, the spec's variables, and how Ray knows its own."""
        found = allowed(os.environ) | self.launch.environment | {"RAY_AUTH_MODE": self._auth()}
        found.pop("RAY_ADDRESS", None)
        if self.token is not None:
            found[token.PATH_ENV] = str(self.token.resolve())
        return found

    def _daemon_environ(self, address: str) -> dict[str, str]:
        found = self._environ() | {
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_IGNORE_UNHANDLED_ERRORS": "1",
            "RAY_gcs_server_port_wait_time_s": str(int(self.launch.start_timeout_s)),
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(max(1, int(self.launch.lost_after_s))),
        }
        interface = interface_of(address)
        if interface is not None:
            found.setdefault("GLOO_SOCKET_IFNAME", interface)
        return found

    def _driver_environ(self, cluster: JobCluster) -> dict[str, str]:
        """Secrets by the names that the spec lists reach the driver alone."""
        secrets = {ref.env: os.environ[ref.env] for ref in self.spec.secrets.values() if ref.env in os.environ}
        return self._environ() | secrets | cluster.variable()

    def _start(self, daemons: RayDaemons, block: Block, address: str, head: str | None) -> None:
        environ = self._daemon_environ(address)
        daemons.start(block, address, self._resources(), environ, head, seconds=self.launch.start_timeout_s)

    def _wait_until_up(self, daemons: RayDaemons) -> None:
        """Others join only a head that stays: one that fails while it starts is started anew."""
        check = self._watch(daemons)
        end = time.monotonic() + self.launch.start_timeout_s
        while not daemons.up:
            check()
            if time.monotonic() > end:
                raise HostLost(
                    f"Ray's head was not up within {self.launch.start_timeout_s:g} s; look at {daemons.log}, or raise `launch.start_timeout_s`"
                )
            time.sleep(_POLL_S)

    def _watch(self, daemons: RayDaemons) -> Callable[[], None]:
        """What ends a wait early: a signal, or the end of Ray."""

        def check() -> None:
            self.signals.check()
            daemons.check()

        return check

    def _log_file(self) -> Path:
        folder = Path(f"{self.spec.output}.jobs") / "nodes"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.name}-{os.getpid()}.ray.log"
