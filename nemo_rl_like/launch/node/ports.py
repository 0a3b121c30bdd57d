"""Which TCP ports a host's part of a job listens on: one block of `launch.ports`, held by listening on its first port."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import NrlError, SpecError
from nemo_rl_like.spec.launch import PortsSpec

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DAEMONS = 12
"""Ports before the workers': the block's own, and one for each of Ray's daemons."""


class PortsTaken(NrlError):
    """Every block of ports of this host is in use."""


@dataclass(frozen=True, slots=True)
class Block:
    """The ports of one host."""

    first: int
    """Held by `nrl node`; on rank 0 the others meet there."""
    last: int

    @property
    def gcs(self) -> int:
        """Ray's head."""
        return self.first + 1

    def flags(self, *, head: bool) -> list[str]:
        """Arguments of `ray start` that name every port it listens on."""
        names = (
            "node-manager",
            "object-manager",
            "runtime-env-agent",
            "dashboard-agent-grpc",
            "dashboard-agent-listen",
        )
        ports = {f"{name}-port": self.first + 2 + i for i, name in enumerate((*names, "metrics-export"))}
        if head:
            ports |= {"port": self.gcs, "ray-client-server-port": self.first + 8, "dashboard-port": self.first + 9}
        ports |= {"min-worker-port": self.first + _DAEMONS, "max-worker-port": self.last}
        return [f"--{name}={port}" for name, port in ports.items()]

    def variables(self) -> dict[str, str]:
        """Ports that Ray takes from the environment alone."""
        return {"AUTOSCALER_METRIC_PORT": str(self.first + 10), "DASHBOARD_METRIC_PORT": str(self.first + 11)}


def blocks(spec: PortsSpec, key: str) -> Iterator[Block]:
    """Every block, from the one that `key` leads to: the order in which a head takes, and others look for it."""
    count = (spec.last - spec.first + 1) // spec.per_node
    start = zlib.crc32(key.encode()) % count
    for i in range(count):
        first = spec.first + (start + i) % count * spec.per_node
        yield Block(first, first + spec.per_node - 1)


def check_range(spec: PortsSpec, ephemeral: Path = _EPHEMERAL) -> None:
    """Ports lie apart from those of outgoing connections. Raises SpecError."""
    low, high = (int(word) for word in ephemeral.read_text(encoding="ascii").split())
    if spec.last >= low and spec.first <= high:
        raise SpecError(
            f"`launch.ports` is {spec.first} to {spec.last}, and this host gives {low} to {high} to outgoing connections "
            f"({ephemeral}), which would take one meanwhile; set `launch.ports.last` below {low}"
        )


def take(spec: PortsSpec, key: str) -> tuple[Block, socket.socket]:
    """The first free block, and the listening socket that holds it for as long as it is open.

    The socket listens on every address of the host, so that two jobs, or two parts of one, never share a block.
    Raises SpecError for ports that outgoing connections use, PortsTaken when no block is free.
    """
    check_range(spec)
    for block in blocks(spec, key):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", block.first))
            listener.listen(128)
        except OSError:
            listener.close()
            continue
        return block, listener
    raise PortsTaken(
        f"every block of {spec.per_node} ports from {spec.first} to {spec.last} is in use on this host; end what runs there, or "
        "widen `launch.ports`"
    )
