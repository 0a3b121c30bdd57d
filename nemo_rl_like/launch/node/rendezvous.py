"""How the hosts of a job meet, and learn of each other's end: rank 0 listens, every other host keeps one connection to it.

A host says what it is and how many devices it has; rank 0 answers with Ray's address. Then both send beats. A host that falls silent, or
whose Ray ends, is an event at rank 0; rank 0's end, with its exit code, or its silence is one at the others.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import nemo_rl_like
from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.launch.node.address import NoAddress
from nemo_rl_like.launch.node.link import Link, LinkLost, Message, beat, number, proof, text
from nemo_rl_like.launch.node.place import Place

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 20.0
_RETRY_S = 0.5


class HostsMissing(NrlError):
    """Not every promised host came in time, or one came with too few devices."""


class _Refused(Exception):
    """A host is not let in; the text says why."""


class HostLost(NrlError):
    """A host of the job fell silent, or its part of Ray ended."""


@dataclass(frozen=True, slots=True)
class Self:
    """What a host says of itself."""

    name: str
    """Host name."""
    devices: int
    """Devices for the job."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened at another host."""

    kind: Literal["lost", "stop", "end"]
    """It is gone; it was asked by a signal to stop; the job has ended."""
    text: str
    """In words."""
    number: int = 0
    """Number of the signal, or exit code of the driver."""


@dataclass(slots=True)
class _Member:
    name: str
    devices: int
    link: Link


class Gathering:
    """Rank 0's side."""

    def __init__(self, listener: socket.socket, place: Place, me: Self, *, token: bytes, lost_after_s: float) -> None:
        """Begin to listen; `token` is empty where hosts need no proof."""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listener = listener
        self._place = place
        self._me = me
        self._token = token
        self._lost_after_s = lost_after_s
        self._ray = ""
        self._members: dict[int, _Member] = {}
        self._refused: list[str] = []
        self._changed = threading.Condition()
        self._ended = threading.Event()

    def open(self, ray_address: str) -> None:
        """Let hosts in, and tell them where Ray's head is."""
        self._ray = ray_address
        threading.Thread(target=self._accept, name="gathering", daemon=True).start()

    def wait_for_all(self, seconds: float, check: Callable[[], None]) -> int:
        """Wait until every host is there; all devices together. `check` is called in between and may raise.

        Raises HostsMissing naming who is there, who is not, and who was refused.
        """
        end = time.monotonic() + seconds
        while True:
            with self._changed:
                if len(self._members) == self._place.nodes - 1:
                    return self._me.devices + sum(m.devices for m in self._members.values())
                self._changed.wait(_RETRY_S)
            check()
            if time.monotonic() > end:
                raise HostsMissing(self._missing(seconds))

    def _missing(self, seconds: float) -> str:
        with self._changed:
            here = ["this host", *(m.name for _, m in sorted(self._members.items()))]
            away = [self._place.name_of(r) for r in range(1, self._place.nodes) if r not in self._members]
            refused = f"; refused: {'; '.join(self._refused[-3:])}" if self._refused else ""
        missing = f"{len(away)} more" if self._place.source == "alone" else ", ".join(away)
        return (
            f"after {seconds:g} s {len(here)} of {self._place.nodes} hosts are there ({', '.join(here)}), missing: {missing}{refused}; "
            "look at the missing hosts' logs, or raise `launch.start_timeout_s`"
        )

    def end(self, code: int) -> None:
        """Tell every host that the job has ended with this exit code, and close."""
        self._ended.set()
        with self._changed:
            members = list(self._members.values())
        for member in members:
            try:
                member.link.send({"say": "end", "code": code})
            except LinkLost as error:
                logger.info("%s did not hear of the end: %s", member.name, error)
        self._listener.close()
        for member in members:
            member.link.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection, str(address)), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        link = Link(connection, _HANDSHAKE_S)
        try:
            rank, member = self._handshake(link, address)
        except LinkLost as error:
            logger.info("a connection from %s was dropped: %s", address, error)
            return link.close()
        except _Refused as error:
            return self._refuse(link, str(error))
        threading.Thread(target=beat, args=(link, self._ended), daemon=True).start()
        try:
            while True:
                self._heard(rank, member, link.receive())
        except LinkLost as error:
            if not self._ended.is_set():
                self.events.put(Event("lost", f"{self._named(rank, member)} was lost: {error}"))

    def _heard(self, rank: int, member: _Member, message: Message) -> None:
        if message.get("say") == "stop":
            signal_number = number(message, "signal")
            who = self._named(rank, member)
            self.events.put(Event("stop", f"{who} was asked to stop by signal {signal_number}", signal_number))
        if message.get("say") == "failed":
            raise LinkLost(text(message, "why"))

    def _handshake(self, link: Link, address: str) -> tuple[int, _Member]:
        """Check who it is; its rank. Raises _Refused, LinkLost."""
        mine = secrets.token_hex(16)
        link.send({"say": "who", "nonce": mine, "job": self._place.key})
        said = link.receive()
        theirs, key, rank = text(said, "nonce"), text(said, "job"), number(said, "rank")
        name, devices = text(said, "name"), number(said, "devices", 0)
        expected = proof(self._token, mine, theirs, key, str(rank), name, str(devices))
        if not secrets.compare_digest(expected, text(said, "proof")):
            raise _Refused(f"{address} does not have this job's token (RAY_AUTH_TOKEN_PATH)")
        if key != self._place.key:
            raise _Refused(f"{address} belongs to job {key!r}, this is {self._place.key!r}")
        if text(said, "version") != nemo_rl_like.__version__:
            raise _Refused(
                f"{name} has version {text(said, 'version')} of this package, the head {nemo_rl_like.__version__}"
            )
        return self._admit(link, rank, _Member(name, devices, link), theirs)

    def _admit(self, link: Link, rank: int, member: _Member, nonce: str) -> tuple[int, _Member]:
        with self._changed:
            free = [r for r in range(1, self._place.nodes) if r not in self._members]
            chosen = rank if rank > 0 else (free[0] if free else self._place.nodes)
            if chosen not in free:
                why = f"{member.name} came as {self._place.name_of(chosen)} of {self._place.nodes} hosts, which is taken or is none"
                raise _Refused(why)
            link.send(
                {"say": "welcome", "ray": self._ray, "proof": proof(self._token, nonce, self._ray), "rank": chosen}
            )
            link.patience(self._lost_after_s)
            self._members[chosen] = member
            self._changed.notify_all()
        logger.info("%s is there with %d devices", self._named(chosen, member), member.devices)
        return chosen, member

    def _refuse(self, link: Link, why: str) -> None:
        logger.warning("refused: %s", why)
        self._refused.append(why)
        with contextlib.suppress(LinkLost):
            link.send({"say": "refused", "why": why})
        link.close()

    def _named(self, rank: int, member: _Member) -> str:
        return f"rank {rank} ({member.name})"


class Membership:
    """Another host's side: a connection to rank 0."""

    def __init__(self, link: Link, rank: int, ray_address: str) -> None:
        self.rank = rank
        self.ray_address = ray_address
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link = link
        self._closed = threading.Event()
        threading.Thread(target=beat, args=(link, self._closed), name="beat", daemon=True).start()
        threading.Thread(target=self._listen, name="membership", daemon=True).start()

    @property
    def address(self) -> str:
        """This host's address on the network that reaches the head."""
        return self._link.here

    @classmethod
    def join(
        cls,
        place: Place,
        me: Self,
        head: Callable[[], str],
        ports: Iterable[int],
        *,
        token: bytes,
        lost_after_s: float,
        seconds: float,
        check: Callable[[], None],
        source: str | None = None,
    ) -> Membership:
        """Find rank 0 at one of `ports` of `head` and be let in; `check` is called in between and may raise.

        `head`: finds its address; a name that does not resolve yet (NoAddress) is asked for again. `source`: own address to connect from.
        Raises HostsMissing when nobody answers in time, or rank 0 refuses.
        """
        wanted = list(ports)
        end = time.monotonic() + seconds
        last = "nothing answers"
        while time.monotonic() < end:
            for port in wanted:
                check()
                try:
                    return cls._try(place, me, (head(), port), token, lost_after_s, source)
                except (LinkLost, OSError, NoAddress) as error:
                    last = f"port {port}: {error}"
            time.sleep(_RETRY_S)
        raise HostsMissing(
            f"the head {place.head} did not let this host in within {seconds:g} s at ports {wanted[0]} to {wanted[-1]} ({last}); is it up, and "
            "reachable from here? Else raise `launch.start_timeout_s`"
        )

    @classmethod
    def _try(
        cls, place: Place, me: Self, head: tuple[str, int], token: bytes, lost_after_s: float, source: str | None
    ) -> Membership:
        connection = socket.create_connection(head, _HANDSHAKE_S, (source, 0) if source else None)
        link = Link(connection, _HANDSHAKE_S)
        try:
            theirs = link.receive()
            if place.port is None and text(theirs, "job") != place.key:
                raise LinkLost("another job's head answers")
            return cls._introduce(place, me, link, text(theirs, "nonce"), text(theirs, "job"), token, lost_after_s)
        except BaseException:
            link.close()
            raise

    @classmethod
    def _introduce(
        cls, place: Place, me: Self, link: Link, nonce: str, job: str, token: bytes, lost_after_s: float
    ) -> Membership:
        mine, rank = secrets.token_hex(16), -1 if place.rank is None else place.rank
        link.send(
            {
                "say": "hello",
                "nonce": mine,
                "job": job,
                "rank": rank,
                "name": me.name,
                "devices": me.devices,
                "version": nemo_rl_like.__version__,
                "proof": proof(token, nonce, mine, job, str(rank), me.name, str(me.devices)),
            }
        )
        answer = link.receive()
        if answer.get("say") == "refused":
            raise HostsMissing(f"the head refused this host: {text(answer, 'why')}")
        ray = text(answer, "ray")
        if not secrets.compare_digest(proof(token, mine, ray), text(answer, "proof")):
            raise HostsMissing("what answers as the head does not have this job's token (RAY_AUTH_TOKEN_PATH)")
        link.patience(lost_after_s)
        return cls(link, number(answer, "rank"), ray)

    def tell(self, message: Message) -> None:
        """Say something to rank 0; nothing where it has gone."""
        try:
            self._link.send(message)
        except LinkLost as error:
            logger.info("the head did not hear %s: %s", message.get("say"), error)

    def close(self) -> None:
        """Leave."""
        self._closed.set()
        self._link.close()

    def _listen(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if message.get("say") == "end":
                    code = number(message, "code")
                    self.events.put(Event("end", f"the driver ended with exit code {code}", code))
                    return
        except LinkLost as error:
            if not self._closed.is_set():
                self.events.put(Event("lost", f"the head was lost: {error}"))
