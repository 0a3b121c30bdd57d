"""Laws of how hosts meet: all come or the missing are named, nobody without the token is let in, silence is an end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nemo_rl_like.launch.node.link import Link
from nemo_rl_like.launch.node.place import Place
from nemo_rl_like.launch.node.rendezvous import Gathering, HostsMissing, Membership, Self

HOST = "127.0.0.1"


def nothing() -> None:
    """A check that finds nothing."""


class Meeting:
    """A head that listens, and hosts that join it."""

    def __init__(self, nodes: int, token: bytes = b"secret", lost_after_s: float = 5.0) -> None:
        self.token, self.lost_after_s = token, lost_after_s
        self.place = Place("slurm", nodes, 0, key="job-1", names=tuple(f"node{i}" for i in range(nodes)))
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        self.head = Gathering(self.listener, self.place, Self("node0", 4), token=token, lost_after_s=lost_after_s)
        self.head.open("10.0.0.1:6379")
        self.stack = ExitStack()

    def join(
        self, rank: int | None, *, token: bytes | None = None, key: str = "job-1", ports: list[int] | None = None
    ) -> Membership:
        place = Place("slurm", self.place.nodes, rank, head=HOST, key=key)
        member = Membership.join(
            place,
            Self(f"node{rank}", 4),
            lambda: HOST,
            ports or [self.port],
            token=self.token if token is None else token,
            lost_after_s=self.lost_after_s,
            seconds=3.0,
            check=nothing,
        )
        self.stack.callback(member.close)
        return member


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    found = Meeting(3)
    with found.stack:
        yield found
        found.head.end(0)


def test_every_host_learns_rays_address_and_the_drivers_exit_code(meeting: Meeting) -> None:
    members = [meeting.join(rank) for rank in (2, 1)]
    assert meeting.head.wait_for_all(5.0, nothing) == 12
    assert [(m.rank, m.ray_address) for m in members] == [(2, "10.0.0.1:6379"), (1, "10.0.0.1:6379")]
    meeting.head.end(75)
    for member in members:
        event = member.events.get(timeout=5)
        assert (event.kind, event.number) == ("end", 75)


def test_the_head_numbers_hosts_that_nobody_has_numbered(meeting: Meeting) -> None:
    assert [meeting.join(None).rank, meeting.join(None).rank] == [1, 2]
    with pytest.raises(HostsMissing, match="which is taken or is none"):
        meeting.join(None)


def test_missing_hosts_are_named(meeting: Meeting) -> None:
    meeting.join(1)
    with pytest.raises(HostsMissing, match=r"2 of 3 hosts are there \(this host, node1\), missing: rank 2 \(node2\)"):
        meeting.head.wait_for_all(0.3, nothing)


def test_a_rank_that_is_there_is_not_taken_twice(meeting: Meeting) -> None:
    meeting.join(1)
    with pytest.raises(HostsMissing, match=r"node1 came as rank 1 \(node1\)"):
        meeting.join(1)


def test_a_host_with_another_token_is_refused_by_name(meeting: Meeting) -> None:
    with pytest.raises(HostsMissing, match="does not have this job's token"):
        meeting.join(1, token=b"other")
    with pytest.raises(HostsMissing, match="refused: 127.0.0.1 does not have this job's token"):
        meeting.head.wait_for_all(0.1, nothing)


def test_a_host_finds_its_own_jobs_head_among_others(meeting: Meeting) -> None:
    other = Meeting(2)
    other.head._place = Place("slurm", 2, 0, key="job-2")
    with other.stack:
        assert meeting.join(1, ports=[other.port, meeting.port]).rank == 1
        other.head.end(0)


def test_a_head_without_the_token_is_not_believed() -> None:
    """It can only repeat what it was sent, which proves nothing."""
    listener = socket.create_server((HOST, 0))

    def answer() -> None:
        connection, _ = listener.accept()
        link = Link(connection, 5.0)
        link.send({"say": "who", "nonce": "0", "job": "job-1"})
        said = link.receive()
        link.send({"say": "welcome", "ray": "evil:1", "proof": said["proof"], "rank": 1})

    threading.Thread(target=answer, daemon=True).start()
    fake = Meeting(2)
    with pytest.raises(HostsMissing, match="what answers as the head does not have this job's token"):
        fake.join(1, ports=[listener.getsockname()[1]])
    fake.head.end(0)
    listener.close()


def test_silence_is_a_loss_on_both_sides() -> None:
    """A host that is cut off closes nothing: only the missing beats tell. The relay stands for the network."""
    meeting = Meeting(2, lost_after_s=1.0)
    relay = Relay(meeting.port)
    member = meeting.join(1, ports=[relay.port])
    meeting.head.wait_for_all(5.0, nothing)
    time.sleep(2.5)
    assert meeting.head.events.empty() and member.events.empty(), "beats keep it alive"
    relay.cut.set()
    event = meeting.head.events.get(timeout=10)
    assert event.kind == "lost" and "rank 1 (node1)" in event.text and "no word for 1 s" in event.text
    assert member.events.get(timeout=10).kind == "lost"
    meeting.stack.close()
    meeting.head.end(1)


def test_a_signal_at_one_host_is_told_to_the_head(meeting: Meeting) -> None:
    member = meeting.join(1)
    member.tell({"say": "stop", "signal": 15})
    event = meeting.head.events.get(timeout=5)
    assert (event.kind, event.number) == ("stop", 15)


def test_a_host_whose_ray_ended_says_why(meeting: Meeting) -> None:
    member = meeting.join(2)
    member.tell({"say": "failed", "why": "Ray's daemons ended"})
    event = meeting.head.events.get(timeout=5)
    assert event.kind == "lost" and event.text == "rank 2 (node2) was lost: Ray's daemons ended"


class Relay:
    """Carries bytes between a port of its own and another, until it is cut: then it drops them and closes nothing."""

    def __init__(self, port: int) -> None:
        self.cut = threading.Event()
        self._target = port
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection((HOST, self._target))
        for a, b in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(4096):
            if not self.cut.is_set():
                target.sendall(data)
        threading.Event().wait()
