"""Laws of a process's place: what each scheduler says is read, and what contradicts is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.launch.node.hostlist import expand
from nemo_rl_like.launch.node.place import Place, PlaceError, read_place, require_groups
from nemo_rl_like.spec.hosts import HostGroup
from nemo_rl_like.spec.launch import LaunchSpec

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "NRL_HEAD_HOST": "run-0.run"}
TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "a",
}


def test_each_scheduler_names_rank_head_and_job() -> None:
    names = ("gpu08", "gpu09", "gpu10")
    assert read_place(SLURM, nodes=3) == Place(
        "slurm", 3, 1, head="gpu08", key="slurm-7.0.0", names=names, job="slurm-7"
    )
    assert read_place(KUBERNETES, nodes=4) == Place(
        "kubernetes", 4, 2, head="run-0.run", key="kubernetes-run-0.run", job="kubernetes-run-0.run"
    )
    assert read_place(TORCHRUN, nodes=2) == Place("torchrun", 2, 0, head="10.0.0.1", key="torchrun-a.0")
    assert read_place({"RAY_ADDRESS": "10.0.0.1:6379"}, nodes=9) == Place("ray", 1, 0, ray_address="10.0.0.1:6379")
    assert read_place({}, nodes=2, join="10.0.0.1:12000") == Place("join", 2, None, head="10.0.0.1", port=12000)
    assert read_place({}, nodes=5) == Place("alone", 5, 0)


def test_a_job_that_starts_again_has_another_key_and_the_same_name() -> None:
    again, first = read_place({**SLURM, "SLURM_RESTART_COUNT": "1"}, nodes=3), read_place(SLURM, nodes=3)
    assert again.key != first.key and again.job == first.job


HETEROGENEOUS = {
    **SLURM,
    "SLURM_STEP_NODELIST": "gpu[01,08-09]",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[08-09]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu01",
}


def groups_of(*counts: int) -> tuple[HostGroup, ...]:
    train, *generate = counts
    values = {"nodes": train, "generation": {"nodes": generate[0]} if generate else None}
    return LaunchSpec.model_validate(values).groups


def test_hosts_of_groups_stand_in_the_order_of_groups_whatever_their_names() -> None:
    """Slurm numbers tasks by group, and sorts the step's list of hosts by name."""
    place = read_place(HETEROGENEOUS, nodes=3)
    assert (place.names, place.head, place.groups) == (("gpu08", "gpu09", "gpu01"), "gpu08", (2, 1))
    require_groups(place, groups_of(2, 1))
    require_groups(read_place(SLURM, nodes=3), groups_of(3))


@pytest.mark.parametrize(
    ("environ", "counts", "words"),
    [
        (SLURM, (2, 1), r"groups of 2 and 1 hosts .*`launch\.generation\.nodes`.*slurm started 3;"),
        (HETEROGENEOUS, (1, 2), "groups of 1 and 2 hosts .* and slurm started 2 and 1;"),
        (HETEROGENEOUS, (3,), "groups of 3 hosts .* and slurm started 2 and 1;"),
        ({}, (2, 1), "and alone started 3;"),
        (TORCHRUN | {"WORLD_SIZE": "3"}, (2, 1), "and torchrun started 3;"),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, (2, 1), "RAY_ADDRESS"),
    ],
)
def test_groups_that_the_scheduler_did_not_make_are_refused(
    environ: dict[str, str], counts: tuple[int, ...], words: str
) -> None:
    with pytest.raises(PlaceError, match=words):
        require_groups(read_place(environ, nodes=3), groups_of(*counts))


def test_an_allocation_without_a_step_is_no_place() -> None:
    """In a batch script or an interactive shell of Slurm, `nrl node` is started by a person."""
    environ = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    assert read_place(environ, nodes=1).source == "alone"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_NUM_TASKS.*--ntasks-per-node=1"),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_PROCID is 1 and SLURM_NODEID 2"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[08-09]"}, "SLURM_STEP_NODELIST names 2 hosts"),
        ({**HETEROGENEOUS, "SLURM_HET_SIZE": "1"}, "HET_GROUP_\\* name 2 hosts.*--het-group=0-0"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({**KUBERNETES, "JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX is 3, and `launch.nodes` 3"),
        ({"JOB_COMPLETION_INDEX": "2"}, "NRL_HEAD_HOST is not set"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE.*--nproc-per-node 1"),
        ({**TORCHRUN, "RANK": "2"}, "RANK is 2.*WORLD_SIZE 2"),
        ({"RAY_ADDRESS": "http://head:8265"}, "RAY_ADDRESS is 'http://head:8265'"),
        ({"RAY_ADDRESS": "auto"}, "RAY_ADDRESS is 'auto'"),
        ({**SLURM, **KUBERNETES}, "by slurm and by kubernetes.*SLURM_PROCID=1, JOB_COMPLETION_INDEX=2"),
        ({**SLURM, "RAY_ADDRESS": "a:1"}, "by slurm and by ray"),
    ],
)
def test_what_contradicts_is_refused_by_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(PlaceError, match=words):
        read_place(environ, nodes=3)


def test_another_number_of_hosts_than_the_spec_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"`launch\.nodes` is 2, but slurm started 3"):
        read_place(SLURM, nodes=2)


@pytest.mark.parametrize("join", ["", "host", "host:", ":5", "host:x", "host:0", "host:99999"])
def test_a_join_that_is_no_address_is_refused(join: str) -> None:
    with pytest.raises(PlaceError, match=r"--join is .*HOST:PORT"):
        read_place({}, nodes=2, join=join)


_NAME = st.from_regex(r"[a-z]{1,4}-?", fullmatch=True)
_RANGE = st.tuples(_NAME, st.integers(0, 30), st.integers(0, 12), st.integers(1, 3))


@settings(deadline=None)
@given(st.lists(_RANGE, min_size=1, max_size=4))
def test_a_host_list_is_written_out_in_its_order(ranges: list[tuple[str, int, int, int]]) -> None:
    text = ",".join(f"{name}[{a:0{w}d}-{a + n:0{w}d}]" for name, a, n, w in ranges)
    assert expand(text) == [f"{name}{i:0{w}d}" for name, a, n, w in ranges for i in range(a, a + n + 1)]


def test_host_lists_mix_ranges_numbers_and_names() -> None:
    assert expand("a[1-2,09]b,login,r[0-1]n[3-4]") == ["a1b", "a2b", "a09b", "login", "r0n3", "r0n4", "r1n3", "r1n4"]


@pytest.mark.parametrize("text", ["", "a[1-", "a[x]", ",a", "a,,b", "a]", "a[1-99999999]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no list of hosts"):
        expand(text)
