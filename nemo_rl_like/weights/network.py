"""Published weights on their way to other hosts: a sealed memory file is served over TCP, and becomes one there.

The bytes go from kernel to kernel (`sendfile`) over several connections at once, and are hashed by whoever loads them. A receiver shows by
HMAC-SHA256 of a challenge that it has the offer's key; the bytes themselves travel in the clear, as those of Ray and of collectives do.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import socketserver
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nemo_rl_like.artifacts import faults
from nemo_rl_like.artifacts.ports import bind_free
from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle, handle_of, new_file, seal, write

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""A connection on which nothing moves for this long has failed."""
_CHUNK = 1 << 20
_PIECE = 64 << 20
"""Smallest piece that is worth a connection of its own, in bytes."""
_MOST_CONNECTIONS = 8
_CHALLENGE = 32
_RANGE = struct.Struct("!QQ")
"""What a receiver asks for: first byte and number of bytes."""
_MAC = 32


@dataclass(frozen=True, slots=True)
class Offer:
    """Where another host fetches published weights; picklable, valid until the serving end publishes again, closes or ends."""

    handle: SharedMemoryHandle
    """The weights on the serving host."""
    nbytes: int
    """Size of the memory file."""
    address: str
    port: int
    key: bytes = field(repr=False)
    """Shared secret of this offer."""


class WeightServer:
    """Serves the memory file of one version to other hosts, on threads of its own, for as long as it is open."""

    def __init__(self) -> None:
        self._server: _Server | None = None

    def offer(self, handle: SharedMemoryHandle, address: str) -> Offer:
        """Serve the file behind a handle of this process at `address`; an earlier offer ends."""
        self.close()
        self._server = server = _Server(os.dup(handle.descriptor), address)
        nbytes = os.fstat(handle.descriptor).st_size
        return Offer(handle, nbytes, address, server.server_address[1], server.key)

    def close(self) -> None:
        """End the offer; a transfer that is under way fails."""
        if self._server is not None:
            self._server.end()
            self._server = None


class WeightMirror:
    """Another host's published weights in a memory file of this one. Holds one version: fetching the next gives back the last one's."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._server = WeightServer()

    def fetch(self, offer: Offer, address: str) -> Offer:
        """Copy what is offered; returns this host's own offer of it, at `address`, with a handle for the processes of this host.

        Raises WeightSyncError naming the serving host when it cannot be reached, refuses or ends early, OSError if memory runs out.
        """
        self.close()
        manifest = offer.handle.manifest
        self._descriptor = descriptor = new_file(manifest.version)
        os.ftruncate(descriptor, offer.nbytes)
        pieces = _pieces(offer.nbytes)
        with ThreadPoolExecutor(len(pieces), "fetch") as pool:
            for done in [pool.submit(_fetch, offer, descriptor, start, end) for start, end in pieces]:
                done.result()
        seal(descriptor)
        logger.info("fetched version %d from %s: %d bytes", manifest.version, offer.address, offer.nbytes)
        return self._server.offer(handle_of(manifest, offer.handle.offsets, descriptor), address)

    def close(self) -> None:
        """Give the memory back (receivers that have it mapped keep it until they are done)."""
        self._server.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * _MOST_CONNECTIONS

    def __init__(self, descriptor: int, address: str) -> None:
        self.descriptor, self.key = descriptor, secrets.token_bytes(32)
        super().__init__((address, 0), _Connection)
        threading.Thread(target=self.serve_forever, args=(0.1,), name="weights", daemon=True).start()

    def server_bind(self) -> None:
        self.server_address = (self.server_address[0], bind_free(self.socket, str(self.server_address[0])))

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        os.close(self.descriptor)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.warning("weights for %s: the transfer ended early (%r)", client_address, sys.exception())


class _Connection(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(_PATIENCE_S)
        challenge = secrets.token_bytes(_CHALLENGE)
        self.request.sendall(challenge)
        asked = _exactly(self.request, _RANGE.size)
        if not hmac.compare_digest(_exactly(self.request, _MAC), _mac(self.server.key, challenge, asked)):
            logger.warning("weights: %s does not have the key; nothing was sent", self.client_address[0])
            return
        start, count = _RANGE.unpack(asked)
        _send(self.request, self.server.descriptor, start, start + count)


def _send(connection: socket.socket, descriptor: int, start: int, end: int) -> None:
    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
        connection.sendfile(file, start, end - start)


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    """Start and end of what each connection carries."""
    count = max(1, min(_MOST_CONNECTIONS, -(-nbytes // _PIECE)))
    bounds = [nbytes * i // count for i in range(count + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def _fetch(offer: Offer, descriptor: int, start: int, end: int) -> None:
    try:
        with socket.create_connection((offer.address, offer.port), _PATIENCE_S) as connection:
            challenge = _exactly(connection, _CHALLENGE)
            asked = _RANGE.pack(start, end - start)
            connection.sendall(asked + _mac(offer.key, challenge, asked))
            _receive(connection, descriptor, start, end)
    except (OSError, EOFError) as error:
        raise WeightSyncError(
            f"weight sync of version {offer.handle.manifest.version}: the weights could not be fetched from {offer.address}:{offer.port} "
            f"({error or type(error).__name__}); the sender ended, closed them or published a newer version, or the network between the hosts is cut"
        ) from error


def _receive(connection: socket.socket, descriptor: int, start: int, end: int) -> None:
    buffer = memoryview(bytearray(min(_CHUNK, max(1, end - start))))
    while start < end:
        count = connection.recv_into(buffer[: end - start])
        if count == 0:
            raise EOFError(f"the connection ended {end - start} bytes early")
        write(descriptor, buffer[:count], start)
        start += count
        faults.point("sync.fetch")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError("the connection ended before it began")
        data += more
    return data


def _mac(key: bytes, challenge: bytes, asked: bytes) -> bytes:
    return hmac.digest(key, challenge + asked, "sha256")
