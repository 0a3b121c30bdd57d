"""This host's part of Ray: `ray start` as a child that is watched, and that ends with everything below it."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster import roles, temp_folder, watchdog
from nemo_rl_like.launch.node.ports import Block
from nemo_rl_like.spec.hosts import HostRole

logger = logging.getLogger(__name__)

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Blocked in Ray's daemons: a scheduler sends them to every process of a job, and only `nrl node` answers."""
PROGRAM = (sys.executable, "-m", "ray.scripts.scripts")
"""Ray's command line."""
_STARTS = 3
"""Starts before Ray is up, at most."""
_TAIL_BYTES = 2000
_FINISH_S = 60.0


class RayEnded(NrlError):
    """Ray's daemons on this host did not start, or ended although nobody asked them to."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What this host gives to Ray."""

    cpus: int
    gpus: int
    object_store_bytes: int
    role: HostRole | None = None
    """What stands on it, where the job's hosts differ."""


class RayDaemons:
    """`ray start --block` of one host. Everything it starts belongs to `node_id`, and ends with this process, however it ends.

    Ray gives its daemons 30 s to come up, which a busy host may exceed: a start that fails before they are up is made again.
    """

    def __init__(self, log: Path) -> None:
        """`log`: file that receives the daemons' output."""
        self.node_id = uuid.uuid4().hex[:16]
        self.log = log
        self._folder = temp_folder.make(self.node_id)
        self._watchdog = watchdog.start(self.node_id, str(self._folder))
        self._process: subprocess.Popen[bytes] | None = None
        self._command: tuple[str, ...] = ()
        self._environ: Mapping[str, str] = {}
        self._starts = 0
        self._start_until = 0.0

    def start(
        self,
        block: Block,
        address: str,
        resources: Resources,
        environ: Mapping[str, str],
        head: str | None,
        *,
        seconds: float,
    ) -> None:
        """Begin to start Ray at `address`: the head, or a part of the one at `head` (`host:port`). After `seconds` no further start is made."""
        place = ["--head", "--include-dashboard=false"] if head is None else [f"--address={head}"]
        self._command = (
            *(*PROGRAM, "start", *place, f"--node-ip-address={address}", "--block"),
            *block.flags(head=head is None),
            *(f"--num-cpus={resources.cpus}", f"--num-gpus={resources.gpus}"),
            *(f"--object-store-memory={resources.object_store_bytes}", f"--temp-dir={self._folder}/{temp_folder.RAYS}"),
            *([f"--resources={json.dumps(roles.of_host(resources.role))}"] if resources.role is not None else []),
            *("--disable-usage-stats", "--log-style=record", "--log-color=false"),
        )
        self._environ = {**environ, **block.variables(), watchdog.RUN_ID_ENV: self.node_id, "TMPDIR": str(self._folder)}
        self._start_until = time.monotonic() + seconds
        self._spawn()

    @property
    def up(self) -> bool:
        """Whether every daemon is up: `ray start` has written the cluster's address, its last act before it waits."""
        return (self._folder / temp_folder.RAYS / "ray_current_cluster").exists()

    def check(self) -> None:
        """Start Ray again where it ended before it was `up`.

        Raises:
            RayEnded: with the last lines of its output, when it has ended after that, or for the third time, or too late.
        """
        if self._process is None or self._process.poll() is None:
            return
        text = self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").rstrip()
        told = f"(exit code {self._process.returncode}); {self.log} ends with:\n{text}"
        if self.up or self._starts >= _STARTS or time.monotonic() > self._start_until:
            raise RayEnded(f"Ray's daemons on this host ended in start {self._starts} of {_STARTS} {told}")
        logger.warning(
            "Ray did not come up on this host in start %d of %d, trying again %s", self._starts, _STARTS, told
        )
        self._clear()
        self._folder.mkdir(mode=0o700)
        self._spawn()

    def _spawn(self) -> None:
        self._starts += 1
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with self.log.open("ab") as stream:
                self._process = subprocess.Popen(
                    self._command,
                    env=dict(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _clear(self) -> None:
        """End every process of this host's Ray, and remove its folder."""
        watchdog.kill_run(self.node_id, str(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """End every process of this host's Ray and of the driver, and remove its folder."""
        watchdog.finish(self._watchdog, _FINISH_S)
        self._clear()
        if self._process is not None:
            self._process.wait(_FINISH_S)
