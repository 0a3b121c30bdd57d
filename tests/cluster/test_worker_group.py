"""Laws of worker groups on a real Ray: every failure is one error in bounded time, references go from worker to worker."""

from __future__ import annotations

import os
import signal
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


def test_a_rank_knows_its_place_threads_and_run(make: MakeGroup, session: RaySession) -> None:
    group = make(axes={"dp": 2, "tp": 1}, threads=2, env={"MY_TOKEN": "s3cret"})
    pending = group.submit("probe", "place")
    group.wait(pending)
    places = ray.get(list(pending))
    assert [place[:4] for place in places] == [(0, {"dp": 0, "tp": 0}, 2, "2"), (1, {"dp": 1, "tp": 0}, 2, "2")]
    assert len({place[4] for place in places}) == 2
    assert group.call("probe", "environ", "NRL_RUN_ID") == session.run_id
    assert group.call("probe", "environ", "MY_TOKEN") == "s3cret"


def test_a_secret_of_the_driver_reaches_no_worker(make: MakeGroup) -> None:
    assert "NRL_TEST_TOKEN" in os.environ, "conftest sets it before Ray starts"
    assert make().call("probe", "environ", "NRL_TEST_TOKEN") is None


def test_output_of_each_rank_is_in_its_own_log(make: MakeGroup, session: RaySession) -> None:
    group = make("talker")
    group.call("probe", "say", "hello", ranks=[1])
    log = (session.log_folder / "talker-1.log").read_text()
    for line in ("\nhello\n", "native hello\n", "INFO probe: logged hello\n"):
        assert line in log
    assert "hello" not in (session.log_folder / "talker-0.log").read_text()


def test_calls_of_one_caller_run_in_order_beside_async_ones(make: MakeGroup) -> None:
    group = make()
    slow = group.submit("probe", "note", 0, 0.5)
    started = time.monotonic()
    assert group.call("probe", "note_async", 4) == 7
    assert time.monotonic() - started < 0.4, "an async method does not wait for the service thread"
    later = [group.submit("probe", "note", number) for number in range(1, 20)]
    for pending in (slow, *later):
        group.wait(pending)
    assert ray.get(later[-1][1]) == list(range(20))


def test_a_call_with_a_late_argument_keeps_its_turn(make: MakeGroup) -> None:
    group, other = make(devices=0), make("other", devices=0)
    late = other.submit("probe", "note", 7, 1.0)
    first = group.submit("probe", "note", late[0])
    second = group.submit("probe", "note", 8)
    group.wait(second)
    group.wait(first)
    assert ray.get(second[0]) == [[7], 8]


def test_services_of_one_process_share_objects(make: MakeGroup) -> None:
    group = make()
    group.host("reader", f"{SERVICES}:Reader", {"start": Hosted("probe", "start"), "probe": Hosted("probe")})
    pending = group.submit("reader", "read")
    group.wait(pending)
    assert ray.get(list(pending)) == [(3, True), (3, True)]


def test_two_ranks_all_reduce_what_another_group_made(make: MakeGroup) -> None:
    group, producer = make(devices=0.5), make("producer", axes={"n": 1}, devices=0)
    producer.host("producer", f"{SERVICES}:Producer")
    group.host("collective", f"{SERVICES}:Collective")
    batch, size = producer.call("producer", "make", 1000)
    assert isinstance(batch, ray.ObjectRef) and size == 1000
    total = group.call("collective", "total", batch, 2.0, what="sum")
    assert torch.equal(total, torch.arange(1000, dtype=torch.float32) * 2 * 3)


def test_a_worker_calls_another_group(make: MakeGroup) -> None:
    group, asking = make(devices=0.5), make("asking", axes={"n": 1}, devices=0)
    asking.host("producer", f"{SERVICES}:Producer", {"other": group.client()})
    assert asking.call("producer", "ask", 5) == 8


@pytest.mark.parametrize(
    ("method", "cause"),
    [("exit", r"called os\._exit\(7\)"), ("kill", "was killed by SIGKILL"), ("crash", "crashed .Segmentation fault")],
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


def test_a_death_inside_a_collective_ends_the_others_and_is_the_one_error(make: MakeGroup) -> None:
    group = make()
    group.host("collective", f"{SERVICES}:Collective")
    with pytest.raises(WorkerDied, match="rank 1"):
        group.call("collective", "die_in", 1)
    assert_ended(group)


def test_an_exception_on_one_rank_ends_the_ranks_that_wait_for_it(make: MakeGroup) -> None:
    group = make()
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="ZeroDivisionError: seven by nothing") as caught:
        group.call("probe", "fail", 0)
    assert time.monotonic() - started < 15
    assert caught.value.rank == 0 and "services.py" in caught.value.traceback and "\x1b" not in str(caught.value)
    assert_ended(group)


def test_our_own_errors_pass_unchanged_and_do_not_break_the_group(make: MakeGroup) -> None:
    group = make()
    with pytest.raises(InputError, match=r"`model\.path` is wrong"):
        group.call("probe", "refuse")
    assert group.call("probe", "note", 1) == [1]


def test_a_hang_ends_at_the_deadline_and_shows_where(make: MakeGroup) -> None:
    group = make()
    with pytest.raises(DeadlineExceeded, match=r"update 9 did not finish within 1 s") as caught:
        group.call("probe", "hang", what="update 9", deadline_s=1)
    assert [who.partition(" (")[0] for who in caught.value.running] == ["policy rank 0", "policy rank 1"]
    assert "in hang" in caught.value.log_tail
    assert_ended(group)


def test_a_wrong_service_is_named(make: MakeGroup) -> None:
    group = make()
    with pytest.raises(InputError, match=r"`?no\.such\.module:Thing"):
        group.host("thing", "no.such.module:Thing")
    with pytest.raises(InputError, match=r"no service 'engine'; it hosts \['probe'\]"):
        group.call("engine", "generate")


def test_a_group_that_cannot_fit_is_refused_at_once(session: RaySession) -> None:
    started = time.monotonic()
    with pytest.raises(ClusterStartError, match=r"needs 64 CPU .*`cluster\.devices`"):
        WorkerGroup.start("big", session=session, axes={"dp": 64})
    assert time.monotonic() - started < 5


def test_a_worker_outlives_a_sigterm_that_is_meant_for_the_driver(make: MakeGroup) -> None:
    group = make()
    pid = group.call("probe", "place")[4]
    os.kill(pid, signal.SIGTERM)
    assert group.call("probe", "place")[4] == pid


def test_shutdown_closes_services_and_ends_processes(make: MakeGroup, session: RaySession) -> None:
    group = make("closing", devices=0.5)
    group.host("collective", f"{SERVICES}:Collective")
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
