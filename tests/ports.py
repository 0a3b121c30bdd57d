"""TCP ports for tests, below those that the kernel gives to outgoing connections, so that none is taken between the look and the use."""

from __future__ import annotations

import random
import socket

_PORTS = range(20000, 32000)


def free_port() -> int:
    """A port of this host that nobody listens on."""
    for port in random.SystemRandom().sample(_PORTS, 64):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free TCP port among 64 tried")
