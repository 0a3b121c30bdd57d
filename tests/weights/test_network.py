"""Laws of weights that go to other hosts: real connections between real processes, on this host's loopback."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.artifacts import faults
from nemo_rl_like.training.spread import by_host, rounds
from nemo_rl_like.weights import network
from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.manifest import compare
from nemo_rl_like.weights.network import Offer, WeightMirror, WeightServer
from nemo_rl_like.weights.shared_memory import SharedMemorySender, read

HERE, THERE = "127.0.0.1", "127.0.0.2"
_DRAW = torch.Generator().manual_seed(1)  # another process draws the same
TENSORS = {
    "model.embed_tokens.weight": torch.randn(700, 501, generator=_DRAW),
    "model.norm.weight": torch.randn(5, generator=_DRAW).bfloat16(),
    "a.empty": torch.empty(0, 3),
}
_SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def offer() -> Iterator[Offer]:
    """Version 3 at HERE."""
    with SharedMemorySender() as sender:
        server = WeightServer()
        yield server.offer(sender.publish(3, TENSORS.items()), HERE)
        server.close()


@pytest.fixture
def mirror() -> Iterator[WeightMirror]:
    found = WeightMirror()
    yield found
    found.close()


def equal(offer: Offer) -> None:
    """What a process of the offer's host reads is what was sent, bit for bit."""
    received = {name: (tensor, digest) for name, tensor, digest in read(offer.handle)}
    compare(offer.handle.manifest, {name: digest for name, (_, digest) in received.items()}, expected=TENSORS)
    assert all(torch.equal(received[name][0], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("piece", [1 << 30, 400_000, 1000])
def test_a_mirror_and_a_mirrors_mirror_equal_what_was_sent(
    offer: Offer, mirror: WeightMirror, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(network, "_PIECE", piece)
    other = WeightMirror()
    first = mirror.fetch(offer, THERE)
    second = other.fetch(first, "127.0.0.3")
    assert (first.address, second.address) == (THERE, "127.0.0.3")
    mirror.close()
    equal(second)
    other.close()


@given(st.integers(0, 10**12))
def test_the_pieces_cover_the_file_once(nbytes: int) -> None:
    pieces = network._pieces(nbytes)
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])] and pieces[-1][1] == nbytes
    assert 1 <= len(pieces) <= 8


def test_a_stranger_without_the_key_gets_nothing(
    offer: Offer, mirror: WeightMirror, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WeightSyncError, match="the connection ended .* bytes early"):
        mirror.fetch(dataclasses.replace(offer, key=b"0" * 32), THERE)
    with socket.create_connection((offer.address, offer.port), 5) as connection:
        connection.recv(32)
        connection.sendall(b"\0" * (network._RANGE.size + 32))
        assert connection.recv(1) == b""
    assert "does not have the key; nothing was sent" in caplog.text
    assert repr(offer.key) not in repr(offer)
    equal(mirror.fetch(offer, THERE))


def test_an_answer_to_one_challenge_is_no_answer_to_the_next(offer: Offer) -> None:
    with socket.create_connection((offer.address, offer.port), 5) as connection:
        challenge, asked = connection.recv(32), network._RANGE.pack(0, 8)
        answer = asked + network._mac(offer.key, challenge, asked)
        connection.sendall(answer)
        assert len(network._exactly(connection, 8)) == 8
    with socket.create_connection((offer.address, offer.port), 5) as connection:
        connection.recv(32)
        connection.sendall(answer)
        assert connection.recv(1) == b""


def test_an_offer_ends_with_the_next_one_and_the_error_names_the_host(mirror: WeightMirror) -> None:
    server = WeightServer()
    with SharedMemorySender() as sender:
        old = server.offer(sender.publish(3, TENSORS.items()), HERE)
        new = server.offer(sender.publish(4, TENSORS.items()), HERE)
        with pytest.raises(WeightSyncError, match=rf"version 3: .* from {HERE}:{old.port} .*newer version"):
            mirror.fetch(old, THERE)
        assert mirror.fetch(new, THERE).handle.manifest.version == 4
    server.close()


def test_memory_threads_and_ports_are_given_back(offer: Offer) -> None:
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    mirror = WeightMirror()
    for _ in range(3):
        equal(mirror.fetch(offer, THERE))
    held = mirror.fetch(offer, THERE)
    mirror.close()
    with pytest.raises(WeightSyncError, match="sender ended, closed it"):
        next(read(held.handle))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((held.address, held.port), 5)
    end = time.monotonic() + 10
    while (len(os.listdir("/proc/self/fd")), threading.active_count()) != before:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_connection_on_which_nothing_moves_is_given_up(
    offer: Offer, mirror: WeightMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_PATIENCE_S", 0.3)
    with socket.create_server((HERE, 0)) as silent:
        dead = dataclasses.replace(offer, port=silent.getsockname()[1])
        with pytest.raises(WeightSyncError, match="timed out"):
            mirror.fetch(dead, THERE)


def _offer_and_wait(connection: Connection) -> None:
    with SharedMemorySender() as sender:
        connection.send(WeightServer().offer(sender.publish(3, TENSORS.items()), HERE))
        connection.recv()


def _fetch_and_die(offer: Offer) -> None:
    os.environ[faults.ENV] = "sync.fetch:1"
    WeightMirror().fetch(offer, THERE)


def test_a_killed_sender_is_named(mirror: WeightMirror) -> None:
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_offer_and_wait, args=(there,))
    process.start()
    offer = here.recv()
    equal(mirror.fetch(offer, THERE))
    os.kill(offer.handle.pid, signal.SIGKILL)
    process.join(10)
    with pytest.raises(WeightSyncError, match=rf"from {HERE}:{offer.port} .*refused.*the sender ended"):
        mirror.fetch(offer, THERE)


def test_a_receiver_killed_in_the_middle_leaves_the_sender_unharmed(
    offer: Offer, mirror: WeightMirror, caplog: pytest.LogCaptureFixture
) -> None:
    process = _SPAWN.Process(target=_fetch_and_die, args=(offer,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    with caplog.at_level(logging.ERROR):
        equal(mirror.fetch(offer, THERE))


@given(st.integers(0, 70))
def test_every_host_is_served_once_by_one_that_holds_the_weights_and_no_round_is_wasted(hosts: int) -> None:
    names = [str(i) for i in range(hosts)]
    made = list(rounds(names, "home"))
    holders = {"home"}
    for pairs in made:
        sources = [source for source, _ in pairs]
        assert set(sources) <= holders and len(set(sources)) == len(sources)
        holders |= {receiver for _, receiver in pairs}
    assert [receiver for pairs in made for _, receiver in pairs] == names
    assert len(made) == math.ceil(math.log2(hosts + 1))


@given(st.lists(st.sampled_from("abc")))
def test_every_rank_stands_at_its_address_once(addresses: list[str]) -> None:
    found = by_host(addresses)
    assert sorted(itertools.chain(*found.values())) == list(range(len(addresses)))
    assert all(addresses[rank] == address for address, ranks in found.items() for rank in ranks)
