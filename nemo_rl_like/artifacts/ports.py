"""TCP ports on which workers listen: below the ephemeral range, so that outgoing connections do not take one meanwhile."""

from __future__ import annotations

import random
import socket

PORTS = range(20000, 32000)
_TRIED = 64


def bind_free(listener: socket.socket, address: str) -> int:
    """Bind to a port of this host that nobody listens on; returns it. Raises RuntimeError when 64 are taken."""
    for port in random.Random().sample(PORTS, _TRIED):
        try:
            listener.bind((address, port))
        except OSError:
            continue
        return port
    raise RuntimeError(f"no free TCP port on {address} among {_TRIED} tried in {PORTS.start}..{PORTS.stop - 1}")


def free_port(address: str) -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        return bind_free(probe, address)
