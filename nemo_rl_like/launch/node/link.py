"""One connection between two hosts of a job: JSON lines, proofs of the shared token, a beat that shows that both ends live."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Mapping

Message = Mapping[str, str | int]
_LONGEST = 1 << 16
BEAT: Message = {"say": "beat"}


class LinkLost(Exception):
    """The other end has closed, broken off or said nothing for too long; the text says which."""


class Link:
    """A connected socket; one thread reads, any may send."""

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        """`silence_s`: longest wait for a message, in seconds."""
        connection.settimeout(silence_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.silence_s = silence_s
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._sending = threading.Lock()

    @property
    def here(self) -> str:
        """This end's address."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send one message. Raises LinkLost."""
        try:
            with self._sending:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LinkLost(f"the connection broke ({error})") from error

    def receive(self) -> Message:
        """The next message. Raises LinkLost."""
        try:
            line = self._reader.readline(_LONGEST)
        except TimeoutError as error:
            raise LinkLost(f"no word for {self.silence_s:g} s") from error
        except (OSError, ValueError) as error:
            raise LinkLost(f"the connection broke ({error})") from error
        if not line.endswith(b"\n"):
            raise LinkLost("the connection was closed")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise LinkLost("it sent what no host of a job sends") from error
        if not isinstance(message, dict) or not all(isinstance(value, str | int) for value in message.values()):
            raise LinkLost("it sent what no host of a job sends")
        return message

    def patience(self, silence_s: float) -> None:
        """Change the longest wait for a message."""
        self.silence_s = silence_s
        self._connection.settimeout(silence_s)

    def close(self) -> None:
        """End the connection; a reader at this end wakes up."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def proof(token: bytes, *words: str) -> str:
    """HMAC-SHA256 of the words (hex): shows that the sender has the token, and does not tell it."""
    return hmac.new(token, "\0".join(words).encode(), hashlib.sha256).hexdigest()


def text(message: Message, name: str) -> str:
    """A text of a message; empty where it has none."""
    value = message.get(name, "")
    return value if isinstance(value, str) else ""


def number(message: Message, name: str, default: int = -1) -> int:
    """A number of a message."""
    value = message.get(name, default)
    return value if isinstance(value, int) else default


def beat(link: Link, stopped: threading.Event) -> None:
    """Send a beat four times within the other end's patience, until `stopped` or the link breaks. Runs in a thread of its own."""
    while not stopped.wait(link.silence_s / 4):
        try:
            link.send(BEAT)
        except LinkLost:
            return
