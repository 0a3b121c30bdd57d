"""Laws of worker groups on a real Ray: a failure is one error in bounded time, references go from worker to worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import Hosted
from nemo_rl_like.cluster.errors import ClusterError, ClusterStartError, DeadlineExceeded, WorkerDied, WorkerFailed
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.ray_session import RaySession

pytestmark = pytest.mark.service
SERVICES = "tests.cluster.services"
TORCH_SERVICES = "tests.cluster.torch_services"
MakeGroup = Callable[..., WorkerGroup]


@pytest.fixture
def make(session: RaySession) -> Iterator[MakeGroup]:
    """Starts two ranks that host a Probe; ends them after the test."""
    started: list[WorkerGroup] = []

    def start(name: str = "policy", **kwargs: object) -> WorkerGroup:
        given = {"axes": {"dp": 1, "tp": 2}, "threads": 1, **kwargs}
        started.append(WorkerGroup.start(name, session=session, **given))
        started[-1].host("probe", f"{SERVICES}:Probe", {"start": 3})
        return started[-1]

    yield start
    for group in started:
        group.shutdown()


@pytest.fixture(scope="module")
def shared(session: RaySession) -> Iterator[WorkerGroup]:
    """Two ranks for the tests that break nothing."""
    env = {"MY_TOKEN": "s3cret"}
    with WorkerGroup.start("shared", session=session, axes={"dp": 2, "tp": 1}, threads=1, env=env, devices=0) as group:
        group.host("probe", f"{SERVICES}:Probe", {"start": 3})
        yield group


def test_a_rank_knows_its_place_and_its_run(shared: WorkerGroup, session: RaySession) -> None:
    pending = shared.submit("probe", "place")
    shared.wait(pending)
    places = ray.get(list(pending))
    assert [place[:2] for place in places] == [(0, {"dp": 0, "tp": 0}), (1, {"dp": 1, "tp": 0})]
    assert len({place[2] for place in places}) == 2
    assert shared.call("probe", "environ", "NRL_RUN_ID") == session.run_id


def test_secrets_reach_the_group_that_is_given_them_and_no_other(shared: WorkerGroup) -> None:
    assert shared.call("probe", "environ", "MY_TOKEN") == "s3cret"
    assert "NRL_TEST_TOKEN" in os.environ, "conftest sets it before Ray starts"
    assert shared.call("probe", "environ", "NRL_TEST_TOKEN") is None


def test_output_of_each_rank_is_in_its_own_log(shared: WorkerGroup, session: RaySession) -> None:
    shared.call("probe", "say", "hello", ranks=[1])
    log = (session.log_folder / "shared-1.log").read_text()
    for line in ("\nhello\n", "native hello\n", "INFO probe: logged hello\n"):
        assert line in log
    assert "hello" not in (session.log_folder / "shared-0.log").read_text()


def test_calls_of_one_caller_run_in_order_beside_async_ones(shared: WorkerGroup) -> None:
    before = len(shared.call("probe", "note", -1))
    slow = shared.submit("probe", "note", 0, 1.0)
    started = time.monotonic()
    assert shared.call("probe", "note_async", 4) == 7
    assert time.monotonic() - started < 0.9, "an async method does not wait for the service thread"
    later = [shared.submit("probe", "note", number) for number in range(1, 20)]
    for pending in (slow, *later):
        shared.wait(pending)
    assert ray.get(later[-1][1])[before:] == list(range(20))


def test_a_call_with_a_late_argument_keeps_its_turn(shared: WorkerGroup, make: MakeGroup) -> None:
    other = make("other", devices=0, axes={"n": 1})
    late = other.submit("probe", "note", 7, 1.0)
    first = shared.submit("probe", "note", late[0])
    second = shared.submit("probe", "note", 8)
    shared.wait(second)
    shared.wait(first)
    assert ray.get(second[0])[-2:] == [[7], 8]


def test_services_of_one_process_share_objects(shared: WorkerGroup) -> None:
    shared.host("reader", f"{SERVICES}:Reader", {"start": Hosted("probe", "start"), "probe": Hosted("probe")})
    pending = shared.submit("reader", "read")
    shared.wait(pending)
    assert ray.get(list(pending)) == [(3, True), (3, True)]


def test_our_own_errors_pass_unchanged_and_do_not_break_the_group(shared: WorkerGroup) -> None:
    with pytest.raises(InputError, match=r"`model\.path` is wrong"):
        shared.call("probe", "refuse")
    assert shared.call("probe", "note", 1)[-1] == 1


def test_a_wrong_service_is_named(shared: WorkerGroup) -> None:
    with pytest.raises(InputError, match=r"'no\.such\.module:Thing' cannot be imported"):
        shared.host("thing", "no.such.module:Thing")
    with pytest.raises(InputError, match=r"no service 'engine'; it hosts \['probe'"):
        shared.call("engine", "generate")


def test_two_ranks_all_reduce_what_a_worker_of_another_group_made(shared: WorkerGroup, make: MakeGroup) -> None:
    group, producer = make(devices=0.5, threads=2), make("producer", axes={"n": 1}, devices=0)
    producer.host("producer", f"{TORCH_SERVICES}:Producer", {"other": shared.client()})
    group.host("collective", f"{TORCH_SERVICES}:Collective")
    assert group.call("collective", "threads") == (2, "2")
    batch, size = producer.call("producer", "make", 1000)
    assert isinstance(batch, ray.ObjectRef) and size == 1000
    total = group.call("collective", "total", batch, 2.0, what="sum")
    assert torch.equal(total, torch.arange(1000, dtype=torch.float32) * 2 * 3)
    assert producer.call("producer", "ask", 5) == 8, "a worker can call another group"
    with pytest.raises(WorkerDied, match="rank 1"):
        group.call("collective", "die_in", 1)
    assert_ended(group)


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        ("exit", r"called os\._exit\(7\)"),
        ("kill", "was killed by SIGKILL"),
        ("crash", "crashed .Segmentation fault"),
    ],
)
def test_a_dead_rank_is_one_error_that_names_it(make: MakeGroup, method: str, cause: str) -> None:
    group = make()
    group.call("probe", "say", "my last line")
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=cause) as caught:
        group.call("probe", method, 1, what="update 3")
    assert time.monotonic() - started < 10
    error = caught.value
    assert (error.role, error.rank) == ("policy", 1) and error.node in str(error)
    assert "update 3" in str(error) and "my last line" in error.log_tail
    with pytest.raises(WorkerDied):
        group.submit("probe", "place")
    assert_ended(group)


def test_an_exception_on_one_rank_ends_the_ranks_that_wait_for_it(make: MakeGroup) -> None:
    group = make()
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="ZeroDivisionError: seven by nothing") as caught:
        group.call("probe", "fail", 0)
    assert time.monotonic() - started < 15
    assert caught.value.rank == 0 and "services.py" in caught.value.traceback and "\x1b" not in str(caught.value)
    assert_ended(group)


def test_a_hang_ends_at_the_deadline_and_shows_where(make: MakeGroup) -> None:
    group = make()
    with pytest.raises(DeadlineExceeded, match=r"update 9 did not finish within 1 s") as caught:
        group.call("probe", "hang", what="update 9", deadline_s=1)
    assert [who.partition(" (")[0] for who in caught.value.running] == ["policy rank 0", "policy rank 1"]
    assert "in hang" in caught.value.log_tail
    assert_ended(group)


def test_a_group_that_cannot_fit_is_refused_at_once(session: RaySession) -> None:
    started = time.monotonic()
    with pytest.raises(ClusterStartError, match=r"needs 64 CPU .*`cluster\.devices`"):
        WorkerGroup.start("big", session=session, axes={"dp": 64})
    assert time.monotonic() - started < 5


def test_a_service_without_a_device_leaves_every_device_to_the_ranks(shared: WorkerGroup, session: RaySession) -> None:
    ranks = session.devices.count
    with WorkerGroup.start("all", session=session, axes={"dp": ranks}, threads=1) as group:
        assert (group.world_size, shared.call("probe", "environ", "NRL_RUN_ID")) == (ranks, session.run_id)


def test_shutdown_closes_services_and_ends_processes(make: MakeGroup, session: RaySession) -> None:
    group = make("closing", devices=0)
    group.shutdown()
    assert "closed\n" in (session.log_folder / "closing-0.log").read_text()
    assert_ended(group)


def assert_ended(group: WorkerGroup) -> None:
    pids = [worker.info.pid for worker in group.client().workers]
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.1)


def test_a_second_session_in_one_process_is_refused(session: RaySession) -> None:
    with pytest.raises(ClusterError, match="already connected"):
        RaySession.start(session.spec, session.log_folder.parent)
