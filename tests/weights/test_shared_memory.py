"""Laws of the shared-memory transport."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch

from nemo_rl_like.artifacts import faults
from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.manifest import compare
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle, SharedMemorySender, read

TENSORS = {
    "model.embed_tokens.weight": torch.randn(7, 5),
    "model.norm.weight": torch.randn(5).bfloat16(),
    "a.transposed": torch.randn(4, 6).t(),
    "a.scalar": torch.tensor(3.5, dtype=torch.float64),
    "a.empty": torch.empty(0, 3),
    "a.integers": torch.arange(9, dtype=torch.int32).reshape(3, 3),
}
_SPAWN = multiprocessing.get_context("spawn")


@pytest.mark.parametrize("name", TENSORS)
def test_what_is_read_equals_what_was_sent_bit_for_bit(name: str) -> None:
    with SharedMemorySender() as sender:
        handle = pickle.loads(pickle.dumps(sender.publish(3, TENSORS.items())))
        received = {n: (t, digest) for n, t, digest in read(handle)}
    tensor, _ = received[name]
    assert tensor.dtype == TENSORS[name].dtype
    assert torch.equal(tensor, TENSORS[name]) and list(received) == list(TENSORS)
    compare(handle.manifest, {n: digest for n, (_, digest) in received.items()}, received.keys(), TENSORS.keys())


def test_a_handle_survives_its_text_form() -> None:
    with SharedMemorySender() as sender:
        handle = sender.publish(3, TENSORS.items())
        assert SharedMemoryHandle.from_json(handle.to_json()) == handle


def test_writing_to_a_received_tensor_changes_nobody_elses() -> None:
    with SharedMemorySender() as sender:
        handle = sender.publish(1, TENSORS.items())
        next(read(handle))[1].zero_()
        assert torch.equal(next(read(handle))[1], TENSORS["model.embed_tokens.weight"])


def test_what_was_published_cannot_be_changed_afterwards() -> None:
    with SharedMemorySender() as sender:
        handle = sender.publish(1, TENSORS.items())
        with pytest.raises(PermissionError):
            os.pwrite(handle.descriptor, b"x", 0)


def test_a_newer_version_ends_the_older_handle_by_name() -> None:
    with SharedMemorySender() as sender:
        old = sender.publish(1, TENSORS.items())
        sender.publish(2, TENSORS.items())
        with pytest.raises(WeightSyncError, match="version 1.*newer version"):
            next(read(old))


def test_a_handle_of_another_node_is_refused() -> None:
    with SharedMemorySender() as sender:
        handle = dataclasses.replace(sender.publish(1, TENSORS.items()), place="elsewhere")
        with pytest.raises(WeightSyncError, match="another node"):
            next(read(handle))


def test_a_name_sent_twice_is_refused() -> None:
    with SharedMemorySender() as sender, pytest.raises(WeightSyncError, match="a.scalar was sent twice"):
        sender.publish(1, [("a.scalar", torch.ones(1))] * 2)


def _send_and_wait(connection: Connection) -> None:
    sender = SharedMemorySender()
    connection.send(sender.publish(1, TENSORS.items()))
    connection.recv()


def _read_all(handle: SharedMemoryHandle) -> None:
    os.environ[faults.ENV] = "sync.mid:1"
    for _ in read(handle):
        pass


def test_a_killed_sender_leaves_no_file_and_an_error_that_names_it() -> None:
    files = set(os.listdir("/dev/shm"))
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_send_and_wait, args=(there,))
    process.start()
    handle = here.recv()
    mapped = next(read(handle))[1]
    os.kill(handle.pid, signal.SIGKILL)
    process.join(10)
    assert mapped.shape == (7, 5)
    with pytest.raises(WeightSyncError, match=rf"process {handle.pid} cannot be opened"):
        next(read(handle))
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "nrl" in name]


def test_a_receiver_killed_in_the_middle_of_a_sync_leaves_the_sender_unharmed() -> None:
    files = set(os.listdir("/dev/shm"))
    with SharedMemorySender() as sender:
        handle = sender.publish(1, TENSORS.items())
        process = _SPAWN.Process(target=_read_all, args=(handle,))
        process.start()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        assert len(list(read(handle))) == len(TENSORS)
    time.sleep(0.1)
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "nrl" in name]
